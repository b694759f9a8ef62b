"""Workloads with the field's parameters: what is sent to every server that a benchmark compares.

`WORKLOADS` names the makers. One call, ``maker(rng, text, **parameters)``, gives a `Workload`, the same for an equal
``rng`` and tokenizer; parameters are in tokens, counts and seconds, and default to those of the benchmark that the
workload comes from, which its module names. `parameters` scales the lengths, `with_working_set` the working set.
Nothing here sends anything, and nothing but `conversation_trace` reads a file.
"""

from load_tests.workloads.chunks import rearranged_chunks
from load_tests.workloads.documents import long_document_qa
from load_tests.workloads.groups import shared_prefix_groups
from load_tests.workloads.makers import WORKLOADS, parameters, with_working_set
from load_tests.workloads.prefixes import working_set_tokens
from load_tests.workloads.rounds import multi_round_qa
from load_tests.workloads.stragglers import straggler_burst
from load_tests.workloads.traces import conversation_trace
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

__all__ = [
    "WORKLOADS",
    "Message",
    "Request",
    "Words",
    "Workload",
    "conversation_trace",
    "long_document_qa",
    "multi_round_qa",
    "parameters",
    "rearranged_chunks",
    "shared_prefix_groups",
    "straggler_burst",
    "with_working_set",
    "working_set_tokens",
]
