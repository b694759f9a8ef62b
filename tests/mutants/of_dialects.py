"""Faults in `app/dialects` and its like: what agents are told, and what of theirs reaches others."""

from __future__ import annotations

from mutant import Mutant

TESTS = "tests/app/dialects/"

MUTANTS = (
    Mutant(
        "clients-text-in-a-header",
        "app/metrics/left_out.py",
        "return text if text in NAMES else OTHER",
        "return text",
        (TESTS + "test_readings.py::test_what_a_client_calls_a_tool_is_no_part_of_the_header",),
        "A client writes headers of answers, and makes a time series of each name.",
    ),
    Mutant(
        "left-out-without-a-word",
        "app/gate/request_context.py",
        "                MutableHeaders(scope=message)[LEFT_OUT_HEADER] = said\n",
        "",
        (TESTS + "test_readings.py::test_hosted_tools_beside_functions_are_left_out_and_the_answer_says_so",),
        "A client believes that the web was searched.",
    ),
    Mutant(
        "last-picture-dropped",
        "app/dialects/chats.py",
        'earlier = number < len(messages) - 1 or role in ("tool", "function")',
        "earlier = True",
        (TESTS + "test_readings.py::test_what_the_last_message_shows_is_refused_all_the_same",),
        "A question about a picture is answered by a model that has not seen it.",
    ),
    Mutant(
        "allowed-tools-allow-all",
        "app/dialects/tools.py",
        'body["tools"], body["tool_choice"] = kept, mode',
        'body["tool_choice"] = mode',
        (TESTS + "test_allowed_tools.py::test_the_others_are_left_out_and_the_mode_is_the_choice",),
        "A tool that a client has not allowed is called.",
    ),
    Mutant(
        "late-orders-at-the-head",
        "app/openai/chat_renderer.py",
        "rendering.orders_in_place = prints_system_in_place(renderer, chat_template, form)",
        "rendering.orders_in_place = False",
        (TESTS + "test_developers.py::test_a_late_order_leaves_the_prompt_before_it_as_it_was",),
        "A late message of the developer costs the KV of the whole conversation.",
    ),
    Mutant(
        "any-model-is-an-alias",
        "app/dialects/asked.py",
        "any(fnmatchcase(name, alias) for alias in aliases)",
        "bool(aliases)",
        (TESTS + "test_readings.py::test_a_model_has_the_names_that_the_settings_give_it_and_one_kv",),
        "A client that asks for another model is answered by this one.",
    ),
    Mutant(
        "start-without-cached-tokens",
        "app/openai/engine_client.py",
        "context.kv_usage.begin(first_usage or prompt_usage(output, prompt_tokens))",
        "del first_usage",
        (TESTS + "test_event_sequences.py::test_messages",),
        "A client that reads usage where a message starts counts reused tokens as computed.",
    ),
    Mutant(
        "error-of-pydantic",
        "app/openai/api.py",
        "        app.add_exception_handler(wrong, answer_wrong_body)\n",
        "        pass\n",
        ("tests/app/openai/test_bad_input.py",),
        "A client reads hundreds of lines about models that it does not know.",
    ),
    Mutant(
        "cut-call-read-as-text",
        "app/dialects/calls.py",
        "                if read[2]:",
        "                if False:",
        ("tests/app/dialects/test_calls.py",),
        "A call that a limit cuts is shown to the user as the model's envelope, or runs with no arguments.",
    ),
)
