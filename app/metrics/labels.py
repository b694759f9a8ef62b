"""Words that metrics count by, where other rooms must say the same ones."""

ENGINE_DEAD, UNREACHABLE, PROCESS_GONE, STOPPED = GONE_REASONS = (
    "engine_dead", "unreachable", "process_gone", "stopped",
)  # fmt: skip
"""Why a replica could not answer (`app.backend.replica_errors`)."""

MOVED, DRAINED, REBALANCED = VOLUNTARY = "moved", "drained", "rebalanced"
"""Why a stream left a replica that was well: an administrator's word, because Serve stops it, or for it is short of
KV."""

HANDED_OVER, HANDOVER_WHOLE, HANDOVER_NOT_NEEDED, HANDOVER_FAILED = HANDOVERS = "done", "whole", "ended", "failed"
"""What became of a prompt that could be handed over: it was; it stayed whole, for less is lost so; its answer ended
with its first token; a replica failed, and it went on as any stream does (`app.continuation.handover`)."""

FITS, REFUSED, TOO_LONG, TOO_LARGE, TOO_SLOW = OUTCOMES = "fits", "refused", "too_long", "too_large", "too_slow"
"""What became of a constraint that was tried out (`app.openai.constraint_worker`)."""

(
    AS_SAMPLED, SPLICED, RETOKENIZED, CHANGED_BY_TEMPLATE, TOOL_CALL, CHANGED_BY_CLIENT, NOT_REMEMBERED, DEFECT,
) = RETURNS = (
    "as_sampled", "spliced", "retokenized", "template", "tool_call", "client", "not_remembered", "defect",
)  # fmt: skip
"""What a conversation's next prompt has in an answer's place (`app.answers`)."""

CHUNK_RECOGNIZED, CHUNK_GIVEN, CHUNK_NOT_FOUND = CHUNKS = "recognized", "given", "not_found"
"""How a blended prompt came to a chunk: by a separator, by its request's text; or a text that is not in the prompt."""

FILL_DROPPED, FILL_FAILED, FILL_FILLED, FILL_INTERRUPTED, FILL_REFUSED = FILLS = (
    "dropped", "failed", "filled", "interrupted", "refused",
)  # fmt: skip
"""How the computation of a chunk alone ended (`app.extensions.blend.precompute`)."""

RANKED_RIGHT, RANKED_WRONG, RANKED_EVEN = RANKED = "right", "wrong", "even"
"""Whether of two answers the longer one was expected to be longer; even: both were expected to be as long."""

(BY_TEMPLATE, BY_BILLING_LINE, BY_DATE, BY_ID, BY_OTHER) = PARTED = ("template", "billing", "date", "id", "other")
"""What a prompt had in front that others had otherwise, by its looks: another turn or other tools, a line of a client's
billing, a date or time, an id; or none of these (`app.divergence`)."""
PARTED_DEFECT = "defect"
