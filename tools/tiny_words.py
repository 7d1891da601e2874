"""Word lists of the small trained model: English and Slovak, with the forms that sentences need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """An English noun; its Slovak nominative and accusative; gender m (animate), i, f or n."""

    en: str
    sk: str
    sk_accusative: str
    gender: str

    def agreement(self, accusative: bool) -> int:
        """Which form of an adjective goes with it: 0 -ý, 1 -ého, 2 -á, 3 -ú, 4 -é."""
        if self.gender == "m":
            return 1 if accusative else 0
        if self.gender == "i":
            return 0
        if self.gender == "f":
            return 3 if accusative else 2
        return 4


NOUNS = tuple(
    Noun(*row.split())
    for row in """
dog pes psa m
boy chlapec chlapca m
teacher učiteľ učiteľa m
brother brat brata m
neighbour sused suseda m
bear medveď medveďa m
wolf vlk vlka m
bird vták vtáka m
doctor lekár lekára m
student študent študenta m
king kráľ kráľa m
house dom dom i
tree strom strom i
table stôl stôl i
bread chlieb chlieb i
train vlak vlak i
bridge most most i
letter list list i
key kľúč kľúč i
yard dvor dvor i
stone kameň kameň i
woman žena ženu f
cat mačka mačku f
sister sestra sestru f
book kniha knihu f
river rieka rieku f
mountain hora horu f
flower ruža ružu f
fish ryba rybu f
school škola školu f
lamp lampa lampu f
child dieťa dieťa n
girl dievča dievča n
city mesto mesto n
apple jablko jablko n
car auto auto n
window okno okno n
milk mlieko mlieko n
pen pero pero n
wine víno víno n
""".strip().splitlines()
)

VERBS = (
    ("sees", "vidí"),
    ("has", "má"),
    ("looks for", "hľadá"),
    ("likes", "ľúbi"),
    ("knows", "pozná"),
    ("wants", "chce"),
    ("finds", "nájde"),
    ("draws", "kreslí"),
    ("follows", "sleduje"),
    ("protects", "chráni"),
    ("buys", "kupuje"),
    ("carries", "nesie"),
)


def _adjective(english: str, stem: str) -> tuple[str, tuple[str, ...]]:
    """The five forms; after a long syllable (a stem given with `'`) the endings are short."""
    short = stem.endswith("'")
    endings = ("y", "eho", "a", "u", "e") if short else ("ý", "ého", "á", "ú", "é")
    return english, tuple(stem.rstrip("'") + ending for ending in endings)


ADJECTIVES = tuple(
    _adjective(*row.split())
    for row in """
new nov
old star
good dobr
small mal
red červen
white biel'
black čiern'
young mlad
kind mil
beautiful krásn'
green zelen
strong siln
quiet tich
wise múdr'
poor chudobn
""".strip().splitlines()
)

PLACES = (
    ("in the morning", "ráno"),
    ("in the evening", "večer"),
    ("today", "dnes"),
    ("at home", "doma"),
    ("every day", "každý deň"),
    ("in Nitra", "v Nitre"),
    ("in Bratislava", "v Bratislave"),
    ("in the forest", "v lese"),
)

TOOL_VERBS = (  # noqa: SIM905 - a list of words reads better as text
    "get find set send make open list move read save drop sort lock ping plan book"
).split()
TOOL_NOUNS = (  # noqa: SIM905 - the same
    "city days name file user mail time room page code note task item path text unit size level "
    "color price score topic owner group route table limit phone title track"
).split()
VALUE_WORDS = (  # noqa: SIM905 - the same
    "Nitra Zilina Kosice Trnava Martin Poprad Levice Presov alpha beta gamma delta red green blue "
    "white north south east west spring summer autumn winter"
).split()
