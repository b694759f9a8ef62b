"""In which form Redis has segments: dense, or sparse (`kvmanager.segments.forms`). What nobody says is dense.

Whoever commits or adopts at Redis says the form of every segment of it, before anything is planned. One thread.
"""

from collections.abc import Mapping

from kvmanager.index.locations import REDIS, Location
from kvmanager.index.stores import Store
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import SegmentKey


class RedisForms:
    """See the module's docstring."""

    def __init__(self, trie: PrefixTrie, stores: Mapping[Location, Store]) -> None:
        self._trie = trie
        self._stores = stores

    def note(self, forms: Mapping[SegmentKey, bytes]) -> None:
        """Note the forms of segments that Redis has; one that is not known there is no error. O(forms)."""
        redis = self._stores.get(REDIS)
        for key, form in forms.items() if redis is not None else ():
            node = self._trie.nodes.get(key)
            copy = None if node is None or redis is None else node.copy_at(redis)
            if copy is not None:
                copy.form = form
