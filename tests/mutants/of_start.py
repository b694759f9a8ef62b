"""Faults in what comes before a server serves: its surroundings, its checks, its processes, and when it is ready."""

from __future__ import annotations

from mutant import Mutant

TESTS = "tests/app/"

MUTANTS = (
    Mutant(
        "another-users-link-entered",
        "requirements/plain_path.py",
        "os.lstat(link).st_uid == os.geteuid() and os.readlink(link) == environment",
        "os.readlink(link)",
        ("tests/requirements/test_plain_path.py::test_a_link_is_used_again_and_another_users_or_a_wrong_one_never",),
        "Who may write to /tmp chooses the Python that another user's server runs.",
    ),
    Mutant(
        "switches-of-python-handed-on",
        "app/launch/surroundings/python.py",
        "if name not in DROPPED | UNSAID}",
        "if name}",
        (
            TESTS + "launch/surroundings/test_python_switches.py::"
            "test_variables_that_ray_does_not_start_with_are_not_handed_on_and_that_is_said",
        ),
        "With PYTHONOPTIMIZE=2 in the shell Ray does not start.",
    ),
    Mutant(
        "files-not-counted-for-haproxy",
        "app/launch/haproxy.py",
        "        **connections_environment(),\n",
        "",
        (TESTS + "launch/test_haproxy.py::test_it_starts_where_few_files_may_be_opened",),
        "With a hard limit of 4,096 open files HAProxy does not start.",
    ),
    Mutant(
        "cut-weights-pass",
        "app/checks/model_files.py",
        "        if wanted != size:\n",
        "        if wanted < size:\n",
        (TESTS + "checks/test_model_files.py::test_a_cut_file_is_refused_as_safetensors_would_refuse_it",),
        "A model whose download was cut is found out after a minute, by a traceback.",
    ),
    Mutant(
        "templates-without-an-end-tried",
        "app/checks/template_trial.py",
        "    for messages in (*_PLAIN, *_OTHERS):\n",
        "    for messages in _PLAIN:\n",
        (TESTS + "checks/test_template_trial.py::test_a_template_that_comes_to_no_end_is_refused",),
        "The ingress renders a system prompt as it starts, and never comes up.",
    ),
    Mutant(
        "a-ray-beside-one-that-hangs",
        "app/launch/ray_start.py",
        '        end_all(Path(options["_temp_dir"]))\n        ray.init',
        "        ray.init",
        (
            TESTS + "launch/test_ray_start.py"
            "::test_it_is_started_twice_at_most_and_the_second_time_with_nothing_of_the_first",
        ),
        "Daemons of a Ray that did not come up stay beside those of the one that did, for as long as the server runs.",
    ),
    Mutant(
        "a-raylet-that-waits-for-a-slow-agent",
        "app/launch/ray_start.py",
        '                command = [*command, f"--{_LISTENS}={ports[_LISTENS]}"]\n',
        "",
        (TESTS + "launch/test_ray_start.py::test_one_whose_agents_do_not_start_for_long_runs_what_needs_none_of_them",),
        "A server does not start on a machine on which one of Ray's agents takes more than 15 s to start.",
    ),
    Mutant(
        "a-killed-launchers-server-left-to-ray",
        "app/launch/serve_run.py",
        "                end_all(ray_folder)\n",
        "                pass\n",
        (TESTS + "launch/test_launch.py::test_a_killed_launcher_takes_its_own_with_it",),
        "What Ray has started stays for a minute and more, and its files for ever.",
    ),
    Mutant(
        "a-session-of-the-servers-own",
        "app/launch/server.py",
        "                process_group=0,\n",
        "                start_new_session=True,\n",
        (TESTS + "launch/test_launch.py::test_it_is_its_users_and_ray_starts_a_dead_haproxy_again",),
        "Linux shares a machine out by sessions: beside a busy one the server gets next to nothing.",
    ),
    Mutant(
        "a-controller-that-looks-ten-times-a-second",
        "app/launch/cluster.py",
        "        **LOOKS_SELDOM,\n",
        "",
        (TESTS + "launch/test_ray_environment.py::test_an_idle_servers_controller_and_log_monitor_look_seldom",),
        "An idle server takes a quarter more of the processors.",
    ),
    Mutant(
        "a-stop-that-waits-for-whom-it-interrupts",
        "app/launch/signals.py",
        "        self._stop = Flag()\n",
        "        self._stop = __import__('threading').Event()\n",
        ("tests/app/launch/test_signals.py::test_a_stop_may_come_at_any_moment",),
        "A launcher that is stopped in the wrong microsecond hangs for ever.",
    ),
    Mutant(
        "stand-in-ended-before-its-requests",
        "app/launch/server.py",
        "        self._descendants.note()\n        if self._child is not None and self._child.poll() is None:\n",
        "        if self._stand_in is not None:\n            self._stand_in.close()\n"
        "        self._descendants.note()\n        if self._child is not None and self._child.poll() is None:\n",
        (
            TESTS + "launch/test_stopping.py"
            "::test_the_haproxy_in_the_place_of_a_dead_one_carries_requests_until_the_server_has_ended",
        ),
        "A stop or a restart cuts the answers that come through the HAProxy in a dead one's place.",
    ),
    Mutant(
        "last-words-before-a-log-lost",
        "app/launch/server.py",
        ', logs / "raylet.err"]:',
        "]:",
        (TESTS + "launch/test_life.py::test_the_last_line_of_a_worker_that_died_at_birth_is_found",),
        "A worker that dies at its birth has no log of its own, and the start ends without its reason.",
    ),
    Mutant(
        "ready-after-answers-between-failures",
        "app/launch/readiness.py",
        "        self._answered = self._answered + 1 if status in self._good else 0\n",
        "        self._answered += status in self._good\n",
        ("tests/app/launch/test_readiness.py::test_one_answer_before_a_failure_is_not_readiness",),
        "The terminal says that the server is ready, and the next requests are answered 503.",
    ),
    Mutant(
        "ready-before-serve-has-told",
        "app/backend/parts_watch.py",
        "            return HealthReport(False, {",
        "            return HealthReport(True, {",
        (TESTS + "backend/test_health.py::test_before_serve_has_told_nothing_is_served",),
        "A load balancer sends requests to a server that has no replica yet.",
    ),
    Mutant(
        "stop-that-make-hands-on-is-impatient",
        "app/launch/signals.py",
        "        self._may_be_handed_on = self._make is not None\n",
        "        self._may_be_handed_on = False\n",
        ("tests/app/launch/test_signals.py::test_a_stop_that_make_hands_on_is_the_same_one",),
        "A SIGTERM to make and all that it runs ends answers that are under way.",
    ),
    Mutant(
        "stand-in-keeps-the-port",
        "app/launch/haproxy.py",
        '        self._instead.write_text(str(self.process.pid), encoding="utf-8")\n',
        "",
        ("tests/app/launch/test_haproxy.py::test_a_dead_haproxys_place_is_taken_until_ray_starts_another_one",),
        "After HAProxy's death Ray's own never listens again.",
    ),
    Mutant(
        "log-line-hides-its-process",
        "app/launch/log_file.py",
        "return json.dumps({**(_object(said) or _of_text(said, now_s)), **whose})",
        "return json.dumps(_object(said) or _of_text(said, now_s))",
        ("tests/app/launch/test_log_file.py::test_an_object_keeps_what_it_has_and_says_whose_it_is",),
        "A log in JSON does not say which process wrote a line.",
    ),
    Mutant(
        "network-taken-for-loopback",
        "app/cluster_checks.py",
        "open_at = [address for address in self.stores if not is_loopback(address)]",
        "open_at = [address for address in self.stores if not is_loopback(address) and ':' not in address]",
        (TESTS + "test_cluster_checks.py::test_only_what_no_other_machine_reaches_needs_no_token",),
        "Another machine that reaches a cluster over IPv6 runs code in it, without a token.",
    ),
    Mutant(
        "replica-listens-on-all-addresses",
        "deployments/replica/serve_process.py",
        "if address.startswith(_EVERYWHERE):",
        "if address == _EVERYWHERE:",
        ("tests/deployments/replica/test_serve_port.py::test_all_addresses_become_the_nodes_own",),
        "Any machine on the network sends pickled calls to its replicas.",
    ),
)
