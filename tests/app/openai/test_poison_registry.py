"""Which prompts may have ended an engine: sentences first, then random worlds with prompts that do end engines."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from app.openai.poison_registry import MOST, MOST_DEATHS, SETTLE_S, TRIAL_S, PoisonRegistry, Turn, Verdict

REFUSE_S = 600.0
PLAIN = (0, 10)


class Book:
    """`PoisonRegistry` with attempts named by their prompt."""

    def __init__(self, *prompts: str) -> None:
        self.registry = PoisonRegistry(REFUSE_S)
        self.now = 1000.0
        for prompt in prompts:
            self.send(prompt)

    def send(self, prompt: str, attempt: str = "") -> None:
        self.registry.sent(attempt or prompt, prompt[0].encode())

    def died(self, prompt: str, replica: str, crash_report: Iterable[str] | None) -> Verdict:
        verdict = self.registry.died(prompt, replica, crash_report, self.now)
        self.registry.ended(prompt)
        return verdict

    def turn(self, prompt: str, oddness: tuple[int, int] = PLAIN) -> Turn:
        return self.registry.turn(prompt[0].encode(), oddness, self.now)

    def refused(self, prompt: str) -> bool:
        return self.registry.refused_s(prompt[0].encode(), self.now) > 0


def test_a_prompt_that_is_named_alone_is_guilty_at_once_and_refused_for_a_while() -> None:
    book = Book("p", "a", "b")
    assert book.died("a", "r1", ["p"]) is Verdict.BYSTANDER
    assert book.died("p", "r1", ["p"]) is Verdict.GUILTY
    assert book.died("b", "r1", ["p"]) is Verdict.BYSTANDER
    assert book.turn("p") is Turn.GUILTY
    assert (book.turn("a"), book.turn("b")) == (Turn.GO, Turn.GO)
    book.now += REFUSE_S
    assert book.turn("p") is Turn.GO


def test_who_has_answered_and_is_named_alone_goes_on_once_and_is_guilty_the_second_time() -> None:
    book = Book("p")
    book.registry.told("p")
    assert book.died("p", "r1", ["p"]) is Verdict.SUSPECT
    assert not book.refused("p")
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p", "p2")
    book.registry.told("p2")
    assert book.died("p2", "r2", ["p2"]) is Verdict.GUILTY
    assert book.refused("p")


def test_who_was_alone_with_an_engine_that_died_stays_charged_however_much_it_answers_elsewhere() -> None:
    book = Book("p")
    book.registry.told("p")
    assert book.died("p", "r1", ["p"]) is Verdict.SUSPECT
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p", "p2")
    book.registry.told("p2")
    book.registry.cleared(b"p")
    assert book.died("p2", "r2", ["p2"]) is Verdict.GUILTY
    assert book.refused("p")


def test_of_those_who_have_answered_the_last_one_is_tried_like_the_others() -> None:
    book = Book("a", "b")
    for prompt in "ab":
        book.registry.told(prompt)
    assert {book.died(prompt, "r1", ["a", "b"]) for prompt in "ab"} == {Verdict.SUSPECT}
    book.now += SETTLE_S
    assert (book.turn("a"), book.turn("b")) == (Turn.GO, Turn.WAIT)
    book.registry.cleared(b"a")
    assert book.turn("b") is Turn.GO


def test_a_copy_that_has_answered_does_not_excuse_one_that_was_being_prefilled() -> None:
    book = Book("p1", "p2")
    book.registry.told("p1")
    assert book.died("p1", "r1", ["p1", "p2"]) is Verdict.GUILTY


def test_copies_of_one_prompt_are_one_suspect() -> None:
    book = Book("p1", "p2")
    assert book.died("p1", "r1", ["p1", "p2"]) is Verdict.GUILTY
    assert book.died("p2", "r1", ["p1", "p2"]) is Verdict.GUILTY


def test_a_culprit_whose_client_has_left_is_known_all_the_same() -> None:
    book = Book("p", "a")
    book.registry.ended("p")
    assert book.died("a", "r1", ["p"]) is Verdict.BYSTANDER
    assert book.refused("p")


def test_suspects_are_tried_one_by_one_plainest_first_and_the_last_one_is_guilty_untried() -> None:
    book = Book("p", "a", "b")
    for prompt in "pab":
        assert book.died(prompt, "r1", ["p", "a", "b"]) is Verdict.SUSPECT
    odd = {"p": (2, 10), "a": (0, 10), "b": (0, 900)}

    def turns() -> dict[str, Turn]:
        return {prompt: book.turn(prompt, odd[prompt]) for prompt in odd if prompt not in done}

    done: set[str] = set()
    assert set(turns().values()) == {Turn.WAIT}, "the others may not have said yet that they were there"
    book.now += SETTLE_S
    for plainest in "ab":
        found = turns()
        assert [prompt for prompt, turn in found.items() if turn is Turn.GO] == [plainest]
        done.add(plainest)
        book.send(plainest)
        assert Turn.GO not in turns().values(), "one at a time"
        book.registry.cleared(plainest.encode())
    assert turns() == {"p": Turn.GUILTY}
    assert book.refused("p")


def test_one_that_ends_a_second_engine_is_guilty_and_the_others_go_at_once() -> None:
    book = Book("p", "a", "b")
    for prompt in "pab":
        book.died(prompt, "r1", ["p", "a", "b"])
        book.turn(prompt, (prompt != "p", 1))
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p")
    assert book.died("p", "r2", ["p"]) is Verdict.GUILTY
    assert (book.turn("a"), book.turn("b")) == (Turn.GO, Turn.GO)


def test_who_tells_of_a_death_after_its_culprit_was_found_is_no_suspect_of_it() -> None:
    book = Book("p", "a", "b")
    assert {book.died(prompt, "r1", ["p", "a"]) for prompt in "pa"} == {Verdict.SUSPECT}
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p")
    assert book.died("p", "r2", ["p", "b"]) is Verdict.GUILTY
    assert book.died("b", "r2", ["p", "b"]) is Verdict.BYSTANDER
    assert book.turn("b") is Turn.GO


def test_a_process_that_is_killed_charges_all_and_twice_is_guilty() -> None:
    book = Book("p", "a")
    assert {book.died(prompt, "r1", None) for prompt in "pa"} == {Verdict.SUSPECT}
    book.turn("p"), book.turn("a", (1, 1))
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p")
    assert book.died("p", "r2", None) is Verdict.GUILTY
    assert book.turn("a", (1, 1)) is Turn.GO


def test_one_that_lived_through_its_trial_is_not_charged_with_the_next_ones() -> None:
    book = Book("p", "a")
    for prompt in "pa":
        book.died(prompt, "r1", None)
    book.turn("a"), book.turn("p", (1, 1))
    book.now += SETTLE_S
    assert book.turn("a") is Turn.GO
    book.send("a")  # it is not streamed: nobody hears of it before its end
    book.now += TRIAL_S
    assert book.turn("p", (1, 1)) is Turn.GO
    book.send("p")
    assert book.died("a", "r2", None) is Verdict.BYSTANDER
    assert book.died("p", "r2", None) is Verdict.GUILTY
    assert book.turn("a") is Turn.GO


def test_a_suspect_whose_client_leaves_holds_up_nobody() -> None:
    book = Book("p", "a", "b")
    for prompt in "pab":
        book.died(prompt, "r1", ["p", "a", "b"])
        book.turn(prompt, (prompt != "p", ord(prompt)))
    book.now += SETTLE_S
    assert book.turn("p") is Turn.GO
    book.send("p")
    book.registry.ended("p")
    book.registry.leave(b"a")
    assert book.turn("b", (1, ord("b"))) is Turn.GO


def test_what_is_remembered_is_bounded() -> None:
    registry = PoisonRegistry(REFUSE_S)
    for number in range(MOST + 500):
        name, digest = str(number), number.to_bytes(4, "big")
        registry.sent(name, digest)
        registry.died(name, f"r{number}", [name] if number % 2 else [name, "other"], 0.001 * number)
        registry.ended(name)
    books = (registry._charges, registry._guilty_until, registry._left)
    assert all(len(book) <= MOST for book in books)
    assert len(registry._deaths) <= MOST_DEATHS
    assert len(registry._line_of) <= MOST_DEATHS, "a suspect that never comes again is forgotten with its death"
    assert not registry._live


class World:
    """Engines that take prompts, compute for some ticks each, and die when they prefill a deadly one."""

    def __init__(self, seed: int, engines: int, reported: bool) -> None:
        self.rng = Random(seed)
        self.reported = reported
        self.registry = PoisonRegistry(REFUSE_S)
        self.now = 0.0
        self.engines: dict[str, list[list[object]]] = {f"r{number}": [] for number in range(engines)}
        self.deadly: set[bytes] = set()
        self.killed_by: dict[bytes, int] = {}
        self.answered: dict[int, bytes] = {}
        self.refused: dict[int, bytes] = {}
        self.waiting: list[tuple[int, bytes]] = []
        self._attempts = 0

    def ask(self, client: int, digest: bytes) -> None:
        self.waiting.append((client, digest))

    def tick(self) -> None:
        self.now += 0.05
        for client, digest in self.rng.sample(self.waiting, len(self.waiting)):
            turn = self.registry.turn(digest, (int(digest in self.deadly) * self.rng.randrange(2), 1), self.now)
            if turn is Turn.WAIT:
                continue
            self.waiting.remove((client, digest))
            if turn is Turn.GUILTY:
                self.refused[client] = digest
                continue
            self._attempts += 1
            name = f"{client}-{self._attempts}"
            self.registry.sent(name, digest)
            self.engines[self.rng.choice(list(self.engines))].append([client, digest, name, 0])
        for replica in list(self.engines):
            self.step(replica)

    def step(self, replica: str) -> None:
        held = self.engines[replica]
        fresh = [entry for entry in held if entry[3] == 0]
        culprits = {entry[1] for entry in fresh if entry[1] in self.deadly}
        if culprits:
            del self.engines[replica]
            self.engines[f"{replica}'"] = []  # Serve starts another
            for digest in culprits:
                self.killed_by[digest] = self.killed_by.get(digest, 0) + 1
            crash_report = [str(entry[2]) for entry in fresh] if self.reported else None
            for client, digest, name, _ in held:
                verdict = self.registry.died(name, replica, crash_report, self.now)  # type: ignore[arg-type]
                self.registry.ended(name)  # type: ignore[arg-type]
                if verdict is Verdict.GUILTY:
                    self.refused[client] = digest  # type: ignore[index,assignment]
                else:
                    self.waiting.append((client, digest))  # type: ignore[arg-type]
            return
        for entry in list(held):
            entry[3] += 1  # type: ignore[operator]
            if entry[3] == 1:
                self.registry.cleared(entry[1])  # type: ignore[arg-type]
            if entry[3] == 4:
                held.remove(entry)
                self.registry.ended(entry[2])  # type: ignore[arg-type]
                self.answered[entry[0]] = entry[1]  # type: ignore[index,assignment]


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "killed"])
def test_in_random_worlds_a_deadly_prompt_ends_two_engines_at_most_and_everybody_else_is_answered(
    reported: bool,
) -> None:
    lost_one = 0
    for seed in range(200):
        world = World(seed, engines=4, reported=reported)
        poison = b"p"
        world.deadly = {poison}
        clients = 0
        for tick in range(400):
            if tick < 100 and world.rng.random() < 0.3:
                # A looping client sends the same deadly prompt one after another; the others send their own.
                looping = world.rng.random() < 0.2
                if not looping or (not any(digest == poison for _, digest in world.waiting)):
                    world.ask(clients, poison if looping else f"honest {world.rng.randrange(30)}".encode())
                    clients += 1
            world.tick()
        assert world.killed_by.get(poison, 0) <= 2
        lost_one += world.killed_by.get(poison, 0) <= 1
        wronged = [digest for digest in world.refused.values() if digest != poison]
        assert not wronged, seed
        assert len(world.answered) + len(world.refused) == clients, seed
    assert not reported or lost_one > 150, "most are named alone"
