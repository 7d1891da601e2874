"""Token ids as words, for endpoints that take text and whose tokenizer is unknown.

Common English words are one token each, with the space before them, in about every vocabulary; the
server's usage says how many they were.
"""

from __future__ import annotations

from collections.abc import Sequence

_TEXT = """
time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot right
study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body
information back parent face others level office door health person art history party
result change morning reason research girl guy moment air teacher force education foot boy
age policy music market sense nation plan college interest experience effect use class
control field development role effort rate heart show leader light voice wife mind price
report decision son view relationship town road arm difference value building action
season society tax director position player record paper space ground form event official
matter center couple site project activity star table need court oil situation cost
industry figure street image phone data picture practice piece land product doctor wall
patient worker news test movie north love support technology step baby computer type
attention film tree source organization hair look century evidence window culture chance
brother energy period course summer plant opportunity term letter condition choice rule
daughter south husband floor campaign material population call economy hospital risk fire
future bank west sport board subject officer rest behavior performance top goal second bed
order author agency nature color store sound movement page race concern series language
response animal
"""

WORDS = tuple(_TEXT.split())


def text_of(ids: Sequence[int]) -> str:
    """A word for each id. Texts of lists with a common beginning have one too."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
