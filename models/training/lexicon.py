"""The closed word lists that every world is made of.

A word in these lists is one token, so a fact has the same length whatever it says, and the attention heads that look
back a fixed number of tokens (see `architecture`) can find it.  All are plain words without spaces or hyphens.  Jobs,
instruments and animals follow "a" or "the", so all begin with a consonant.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karen Leo Maria Noah Olga Paul Rosa Simon Tara Victor
    Wendy Xenia Yusuf Zoe Adam Bella Carl Diana Erik Fiona George Hanna Ivan Julia Kevin Laura Martin Nina Oscar
    Petra Quinn Robert Sara Thomas Ursula Vera Walter Yara Alice Bruno Cecil Dora Edgar Frida Gustav Helen Igor Jane
    Klaus Lena Marco Nora Otto Paula Ralph Stella Theo Uma Vincent Willa Amir Bianca Caleb Daisy Elias Flora Gino
    Hilda Isaac Judith Kurt Linda Milo Nadia Oliver Pia Ramon Sonia Tobias Viola Warren Yvonne Alan Berta Chen
    Denise Ethan Farah Gwen Hugo Irene Jack Kira Luis Mona Nils Olive Peter Rita Sven Tina Umar Vivian Wanda Aisha
    Boris Carmen Dmitri Ella Frank Gloria Hassan Ines James Kate Lars Mary Naomi Omar Priya Rachel Samuel Teresa
    Viktor Yuki Zara Bob Charlie Eve John Lucy Tom Max Mia
    """
)

CITIES: tuple[str, ...] = _words(
    """
    Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Copenhagen Athens
    Budapest Brussels Amsterdam Zurich Geneva Milan Naples Venice Florence Turin Munich Hamburg Cologne Dresden
    Leipzig Lyon Nice Marseille Bordeaux Toulouse Seville Valencia Bilbao Porto Krakow Riga Vilnius Tallinn Kyiv
    Moscow Istanbul Ankara Cairo Tunis Algiers Lagos Nairobi Accra Dakar Tokyo Kyoto Osaka Nagoya Seoul Busan
    Beijing Shanghai Delhi Mumbai Chennai Kolkata Karachi Lahore Dhaka Bangkok Hanoi Manila Jakarta Singapore Sydney
    Melbourne Perth Brisbane Auckland Toronto Montreal Vancouver Ottawa Calgary Boston Chicago Seattle Denver Dallas
    Houston Austin Miami Atlanta Phoenix Portland Detroit Havana Lima Quito Bogota Caracas Santiago Brasilia
    Salvador Recife Montevideo Glasgow Edinburgh Cardiff Belfast Leeds Bristol Oxford Cambridge York Bergen Malmo
    Basel Bern Salzburg Graz Ghent Antwerp Utrecht Sofia Bucharest Belgrade Zagreb
    """
)

JOBS: tuple[str, ...] = _words(
    """
    baker doctor teacher nurse lawyer painter singer dancer writer farmer fisher pilot sailor driver cook waiter
    tailor jeweler carpenter plumber mason welder miner butcher barber gardener florist librarian judge soldier
    dentist surgeon chemist physicist biologist geologist banker broker manager clerk porter guard detective
    reporter photographer director producer composer poet translator programmer designer mechanic potter weaver
    shepherd
    """
)

INSTRUMENTS: tuple[str, ...] = _words(
    """
    piano violin cello flute trumpet guitar harp drums banjo clarinet trombone saxophone mandolin lute tuba bagpipes
    """
)

ANIMALS: tuple[str, ...] = _words(
    """
    dog cat horse parrot rabbit turtle hamster goat pony canary lizard snake hedgehog duck pig donkey
    """
)

COLORS: tuple[str, ...] = _words(
    """
    red blue green yellow black white brown purple pink gray golden silver
    """
)

OBJECTS: tuple[str, ...] = _words(
    """
    ball box car bike book lamp chair table clock cup plate bowl bottle hat coat scarf shoe bag key ring watch pen
    pencil knife spoon fork mirror carpet pillow blanket basket bucket hammer ladder rope kite drum doll robot train
    boat tent stove sofa desk shelf vase candle camera phone radio laptop wallet umbrella suitcase telescope globe
    map
    """
)

# Sentences that state no fact anybody asks for; they stretch a context without using up names.
NOTE_SUBJECTS: tuple[str, ...] = _words(
    """
    market bridge river library museum station garden harbor castle theater school bakery park tower forest lake
    street square
    """
)
NOTE_ADJECTIVES: tuple[str, ...] = _words("old new small large quiet busy famous")
NOTE_PREDICATES: tuple[str, ...] = (
    "opens early",
    "closes late",
    "looks bright",
    "was crowded",
    "was painted again",
    "needs some repairs",
    "welcomes many visitors",
    "stays calm",
    "feels warm",
)
NOTE_TIMES: tuple[str, ...] = (
    "in spring",
    "in summer",
    "in autumn",
    "in winter",
    "on Monday",
    "on Friday",
    "on Sunday",
    "after lunch",
    "before noon",
    "at night",
    "every week",
)

TITLES: tuple[str, ...] = ("People", "Profiles", "Inventory", "Things", "Notes", "News", "Register", "Report")


def value_words() -> frozenset[str]:
    """Every word that can be what a question asks for; these carry the full loss weight in answers."""
    return frozenset((*NAMES, *CITIES, *JOBS, *INSTRUMENTS, *ANIMALS, *COLORS, *OBJECTS))
