"""The words that are one token each, by what the generated text uses them for.

A word and the space before it are one token; all other text is bytes, one token each.
"""

KEYS = tuple(
    "ruby amber jade opal pearl topaz onyx quartz coral ivory copper silver falcon otter badger "
    "heron lynx raven beaver marten bison walrus gecko magpie maple cedar willow birch aspen "
    "hazel laurel juniper comet nova orbit nebula saturn pluto vega orion anchor compass "
    "lantern hammer ladder kettle mirror violin".split()
)
"""What facts are about. No other text has these words, except lists to copy."""

VALUES = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty "
    "red orange yellow green blue violet pink brown grey black white gold crimson teal indigo "
    "beige north south east west spring summer autumn winter monday tuesday wednesday thursday "
    "friday saturday sunday noon".split()
)
"""What facts say. No other text has these words, except lists to copy."""

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Greta Hugo Iris Jonas Karin Leo Mia Noah Olga Paul".split()
)
NOUNS = tuple(
    "apple boat bottle book box cake chair coat cup door flower hat horse key lamp letter map "
    "picture ring shoe stone table ticket wagon".split()
)
ADJECTIVES = tuple(
    "big broken clean cold dark empty heavy little long new old pretty quiet shiny strange "
    "warm".split()
)
VERBS = tuple(
    "bought brought carried dropped found hid lost moved opened painted saw sold took "
    "wanted".split()
)
PLACES = tuple(
    "barn bridge church field forest garden harbour house kitchen market mill river school shop "
    "station tower".split()
)
WEATHER = tuple("cloudy cool foggy fine rainy snowy sunny windy".split())
FUNCTION = tuple(
    "The the a and was were had to in at near with from it that said then Then because but so "
    "very not all went came home day Day morning evening asked smiled who there where together "
    "again They they she he".split()
)

WORDS = tuple(
    dict.fromkeys(KEYS + VALUES + NAMES + NOUNS + ADJECTIVES + VERBS + PLACES + WEATHER + FUNCTION)
)
