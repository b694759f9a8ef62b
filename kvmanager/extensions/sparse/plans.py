"""Plans of tolerant prompts whose beginning is stored sparse, where more of it is than dense.

Such a prefix takes the place of the prompt's own chain, under the plan's lease. One thread.
"""

from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, asked_budgets, most_blocks, retained_prefix, serves
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.moves.chain_search import FoundChain
from kvmanager.moves.plan import PlanQuery
from kvmanager.moves.plan_draft import PlanDraft, PromptExtension
from kvmanager.segments.keys import SegmentKey


class SparsePlans:
    """See the module's docstring."""

    def asked(self, query: PlanQuery) -> PromptExtension | None:
        """Return what is to be done for a prompt whose asker presents budgets."""
        budgets = asked_budgets(query)
        return None if budgets is None else _SparsePrompt(budgets)


class _SparsePrompt(PromptExtension):
    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._found = False

    def find(self, draft: PlanDraft) -> None:
        """Take the sparse prefix where it goes further than what is stored dense, or on the device."""
        found = self._stored(draft)
        if found is not None:
            draft.found, draft.hashes, draft.device_blocks = found, draft.query.hashes, 0
            self._found = True

    def extend(self, draft: PlanDraft) -> None:
        """Bring what is chosen of the sparse prefix as one; nothing of it where the device has as much, dense."""
        if not self._found:
            return
        if draft.segments and draft.segments[-1].end_block <= _device_blocks(draft):
            draft.segments, draft.copies = [], []
        sparse = retained_prefix(self._budgets, draft.segments, [copy.form for copy in draft.copies])
        if sparse is not None:
            draft.extras[SPARSE], draft.apart = sparse, True

    def _stored(self, draft: PlanDraft) -> FoundChain | None:
        """Return the whole segments that begin a prompt, sparse ones among them; None for no more than dense ones."""
        query, budgets = draft.query, self._budgets
        hashes, most = query.hashes, most_blocks(query, draft.block_tokens)
        stored = draft.search.stored(hashes, draft.reader.node, lambda form: serves(form, budgets))
        count = end = 0
        for link, part_end in zip(stored.path, stored.ends, strict=False):
            whole = link.start_block == end and link.end_block == part_end <= most
            if not whole or SegmentKey(hashes[part_end - 1]) != link.key:
                break
            count, end = count + 1, part_end
        dense_blocks = max(draft.found.stored_to, _device_blocks(draft))
        if end <= dense_blocks or not any(copy.form for copy in stored.copies[:count]):
            return None
        return FoundChain(stored.path[:count], stored.ends[:count], stored.copies[:count])


def _device_blocks(draft: PlanDraft) -> int:
    """Return how many leading blocks the device has now, dense."""
    return draft.choice.device_tokens // draft.block_tokens


def build(loads: LoadChoice | None) -> SparsePlans:
    """Make it; ``loads`` chooses of a sparse prefix as of any other."""
    del loads
    return SparsePlans()
