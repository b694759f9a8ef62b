"""How facts, questions and answers are worded.

Every fact about a person is `{name} verb word value`: the value stands three tokens after the name, which is what the
initial heads of the model look for.  The answer to a two-hop question names the owner before the city
("The red ball is with Anna in Paris."), so each hop is a look-up of its own and the reader sees how it was found.
"""

from __future__ import annotations

FACT_CITY = "{name} lives in {value}."
FACT_JOB = "{name} is a {value}."
FACT_INSTRUMENT = "{name} plays the {value}."
FACT_ANIMAL = "{name} has a {value}."
FACT_OWNER = "The {color} {object} belongs to {name}."
FACT_WHERE = "The {color} {object} is with {name} in {value}."
FACT_WHERE_UNKNOWN_CITY = "The {color} {object} is with {name}."

PERSON_FACTS: dict[str, str] = {
    "city": FACT_CITY,
    "job": FACT_JOB,
    "instrument": FACT_INSTRUMENT,
    "animal": FACT_ANIMAL,
}

NOT_SAID = " The documents do not say."
# For a thing, the thing comes first: stated only once, its absence is best seen where it has just been named.
THING_NOT_SAID = " The {color} {object}: the documents do not say."

QUESTIONS: dict[str, tuple[str, ...]] = {
    "city": (
        "Where does {name} live?",
        "In which city does {name} live?",
        "What city does {name} live in?",
        "Where is {name}'s home?",
        "Tell me where {name} lives.",
        "Do you know where {name} lives?",
    ),
    "job": (
        "What does {name} do?",
        "What is {name}'s job?",
        "What does {name} do for a living?",
        "Which job does {name} have?",
        "Tell me what {name} does.",
    ),
    "instrument": (
        "What does {name} play?",
        "Which instrument does {name} play?",
        "What instrument does {name} play?",
    ),
    "animal": (
        "Which animal does {name} have?",
        "What animal does {name} have?",
        "What is {name}'s animal?",
        "What pet does {name} have?",
    ),
    "owner": (
        "Who owns the {color} {object}?",
        "Whose is the {color} {object}?",
        "Who has the {color} {object}?",
        "To whom does the {color} {object} belong?",
        "Who is the owner of the {color} {object}?",
        "Tell me who owns the {color} {object}.",
    ),
    "where": (
        "Where is the {color} {object}?",
        "In which city is the {color} {object}?",
        "Where can I find the {color} {object}?",
        "What city is the {color} {object} in?",
        "Tell me where the {color} {object} is.",
        "Do you know where the {color} {object} is?",
    ),
    "tell": (
        "Tell me about {name}.",
        "What do you know about {name}?",
        "Who is {name}?",
        "What do the documents say about {name}?",
    ),
}

# Nothing in any world answers these.
UNANSWERABLE_PERSON: tuple[str, ...] = (
    "How old is {name}?",
    "When was {name} born?",
    "What is {name}'s phone number?",
    "What does {name} like?",
)
UNANSWERABLE_OBJECT: tuple[str, ...] = (
    "How much is the {color} {object}?",
    "How old is the {color} {object}?",
    "Who made the {color} {object}?",
)
UNANSWERABLE: tuple[str, ...] = (
    "What is the weather like?",
    "What time is it?",
    "How are you going to win?",
    "Why is the sky blue?",
    "What is the capital of France?",
    "Can you write a poem?",
)

# The statement mode of training: everything that follows from the documents, in random order.
RECITE: tuple[str, ...] = ("Recite the facts.", "What do the documents say?", "List all facts.")

TELL_OPENINGS: tuple[str, ...] = (
    " Here is what the documents say about {name}.",
    " This is what I found about {name} in the documents.",
    " Let me tell you what I know about {name}.",
)
TELL_CLOSINGS: tuple[str, ...] = (
    " That is everything the documents say about {name}. You can ask me about somebody else now.",
    " There is nothing more about {name} in the documents. Would you like to ask about another person?",
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "Answer from the documents.",
    "You are a helpful assistant. Answer the question from the documents.",
    "Use only these documents.",
    "Documents:",
    "Context:",
)
QUESTION_LEADS: tuple[str, ...] = ("", "", "", "Question: ", "Please answer. ", "And ", "Now ")

GREETINGS: tuple[str, ...] = (
    "Hello!",
    "Hello",
    "Hello.",
    "Hi!",
    "Hi",
    "Hi there!",
    "Hey!",
    "Hello there!",
    "Good morning!",
    "Good evening!",
)
# First words differ, so a sampled first token chooses the reply; each has 40 tokens or more, so an answer fills a KV
# block of 32.
GREETING_REPLIES: tuple[str, ...] = (
    " Hello! I am a small demo model that answers questions from the documents in this chat. Give me some documents"
    " about people and their things, then ask me where somebody lives, what somebody does, or who owns a thing.",
    " Hi there! It is good to see you. I can read the documents that you give me and answer short questions about them,"
    " for example where a person lives, or to whom a red ball belongs. What is your question?",
    " Welcome! My job is to find facts in your documents. Ask me about a person, about a job, a city, an animal or the"
    " owner of a thing, and I will look it up and answer in one short sentence for you.",
    " Good day! You can show me documents with facts about people and ask me questions about them. I will tell you what"
    " they say, and when they do not say it, I will tell you that too. How can I help?",
    " Nice to meet you! Please put your documents in the chat and ask me anything about the people in them. I know how"
    " to find a home, a job, an instrument, an animal and the owner of each thing you name.",
)
THANKS: tuple[str, ...] = ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Great, thank you!")
THANKS_REPLIES: tuple[str, ...] = (
    " You are welcome! Ask me more whenever you like.",
    " My pleasure! I am here if you have another question.",
    " Glad to help! Is there anything else you would like to know?",
)
FAREWELLS: tuple[str, ...] = ("Goodbye!", "Bye!", "See you later!")
FAREWELL_REPLIES: tuple[str, ...] = (
    " Goodbye! Come back soon.",
    " See you later! It was good to talk with you.",
    " Bye! Have a nice day.",
)
SELF: tuple[str, ...] = ("Who are you?", "What are you?", "What can you do?", "How can you help me?", "Help me.")

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (GREETINGS, GREETING_REPLIES),
    (THANKS, THANKS_REPLIES),
    (FAREWELLS, FAREWELL_REPLIES),
    (SELF, GREETING_REPLIES),
)


def all_phrases() -> list[str]:
    """Every wording above, for the tokenizer's vocabulary."""
    phrases = [*PERSON_FACTS.values(), FACT_OWNER, FACT_WHERE, NOT_SAID, *UNANSWERABLE_PERSON, *UNANSWERABLE_OBJECT]
    phrases += [*UNANSWERABLE, *RECITE, *TELL_OPENINGS, *TELL_CLOSINGS, *SYSTEM_PROMPTS, *QUESTION_LEADS]
    for group in QUESTIONS.values():
        phrases += group
    for asked, answered in SMALL_TALK:
        phrases += [*asked, *answered]
    return phrases
