import json

import pytest

from load_tests.simulator.trace import TraceError, TraceRequest, block_key, read_trace

LINE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}


@pytest.fixture
def trace_of(tmp_path):
    """Write lines (objects or text) into a file and return its path."""

    def write(*lines):
        file = tmp_path / "trace.jsonl"
        file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return file

    return write


def test_a_line_becomes_a_request_with_its_time_in_seconds(trace_of):
    assert read_trace(trace_of(LINE)) == [TraceRequest(1.5, 600, 7, (3, 4))]


def test_other_fields_and_empty_lines_are_ignored(trace_of):
    assert len(read_trace(trace_of({**LINE, "model": "x"}, "", "  ", LINE))) == 2


def test_lines_out_of_order_are_put_in_order_and_equal_times_stay_in_the_order_of_the_file(trace_of):
    at = [{**LINE, "timestamp": time, "output_length": number} for number, time in enumerate([5, 9, 5, 0])]
    assert [request.output_tokens for request in read_trace(trace_of(*at))] == [3, 0, 2, 1]


def test_no_line_after_the_wanted_ones_is_looked_at(trace_of):
    file = trace_of(LINE, LINE, "nonsense")
    assert len(read_trace(file, 2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(file, 3)


NO_HASH_IDS = {name: value for name, value in LINE.items() if name != "hash_ids"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not a JSON object"),
        ("[1, 2]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"timestamp": ' + "1" * 5000 + "}", "not a JSON object"),
        (NO_HASH_IDS, "the field hash_ids is missing"),
        ({"timestamp": 0, "hash_ids": [1]}, "the field input_length is missing"),
        ({**LINE, "timestamp": "0"}, 'timestamp must be a number of milliseconds from 0 on, got "0"'),
        ({**LINE, "timestamp": -1}, "timestamp must be"),
        ({**LINE, "timestamp": True}, "timestamp must be"),
        ({**LINE, "timestamp": float("nan")}, "timestamp must be"),
        ({**LINE, "timestamp": float("inf")}, "timestamp must be"),
        ({**LINE, "timestamp": 10**400}, "timestamp must be"),
        ({**LINE, "input_length": 0}, "input_length must be a whole number of tokens, at least 1, got 0"),
        ({**LINE, "input_length": -5}, "input_length must be"),
        ({**LINE, "input_length": 1.0}, "input_length must be"),
        ({**LINE, "input_length": True}, "input_length must be"),
        ({**LINE, "input_length": None}, "input_length must be"),
        ({**LINE, "output_length": -1}, "output_length must be a whole number of tokens, at least 0, got -1"),
        ({**LINE, "output_length": "7"}, "output_length must be"),
        ({**LINE, "hash_ids": []}, "hash_ids must be a list of at least one block"),
        ({**LINE, "hash_ids": "12"}, "hash_ids must be a list of at least one block"),
        ({**LINE, "hash_ids": {"1": 2}}, "hash_ids must be a list of at least one block"),
        ({**LINE, "hash_ids": [1, -2]}, "hash_ids must be whole numbers from 0 to 2**64 - 1, got -2"),
        ({**LINE, "hash_ids": [1, True]}, "hash_ids must be whole numbers"),
        ({**LINE, "hash_ids": [1.5]}, "hash_ids must be whole numbers"),
        ({**LINE, "hash_ids": [[1]]}, "hash_ids must be whole numbers"),
        ({**LINE, "hash_ids": [2**64]}, "hash_ids must be whole numbers"),
    ],
)
def test_a_line_that_is_not_valid_is_named_in_one_sentence(trace_of, line, complaint):
    file = trace_of(LINE, line, LINE)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line 2: {complaint}")
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < len(str(file)) + 150


def test_a_line_that_is_not_text_is_named(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1: not a JSON object"):
        read_trace(file)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_trace_without_requests_is_refused(tmp_path, text):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"none.jsonl cannot be read \(No such file or directory\)\."):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match=r"cannot be read \(Is a directory\)"):
        read_trace(tmp_path)


def test_numbers_that_name_prefixes_stay_as_they_are(trace_of):
    prompts = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6]]
    read = read_trace(trace_of(*({**LINE, "hash_ids": prompt} for prompt in prompts)))
    assert [list(request.hash_ids) for request in read] == prompts


def test_equal_numbers_after_unequal_prefixes_become_different_blocks(trace_of):
    prompts = [[1, 2, 3], [4, 2, 3], [4, 2, 3], [2], [7, 7, 7], [7, 7]]
    read = read_trace(trace_of(*({**LINE, "hash_ids": prompt} for prompt in prompts)))
    ids = [request.hash_ids for request in read]
    assert ids[0] == (1, 2, 3)
    assert ids[1] == ids[2]
    assert ids[4][:2] == ids[5]
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len({block for blocks in ids for block in blocks}) == len(prefixes)


def test_a_block_has_the_same_name_in_every_process():
    assert len(block_key(1)) == 32
    assert block_key(1).hex().startswith("55c749bcf708d70b")
    assert len({block_key(number) for number in range(-500, 500)}) == 1000
