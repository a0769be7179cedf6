"""A final answer and the gold aliases -> a score in [0, 1], by the scorers of SPEC 3.

`em` is ours: exact match after `normalise`, numbers compared by value. `sub_em` asks for a gold at
word borders inside the answer, `f1` for word overlap; both read words as `em` does. The others are
the benchmarks' own (rewards/published.py): `em_published` is the SQuAD normalisation, also that of
MMSearch-R1's reward, kept with its known faults (decimal points are lost: "3.14" equals "314") so
that figures can stand beside published ones; `infoseek`; `mmsearch_f1`; `simplevqa` and `livevqa`,
whose official verdict is a judge's, score 1 where the rule grades `correct` by `em`.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import re
import unicodedata
from collections.abc import Callable, Sequence

from svrl_jax.rewards import published

SCORERS = (
    "em", "em_published", "sub_em", "f1", "infoseek", "mmsearch_f1", "simplevqa", "livevqa",
)  # fmt: skip

_ARTICLES = frozenset({"a", "an", "the"})
# Punctuation that says something at a word's edge: units, C#, R&D.
_MEANINGFUL = frozenset("%‰#&@§′″")
_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_QUANTITY = re.compile(
    rf"(?P<sign>[+-]?)(?P<currency>(?:[a-z]{{1,3}})?[$€£¥₹₩₽₺₫฿₦₱₴₪])? ?(?P<sign2>-?)"
    rf"(?P<number>{_NUMBER})"
    r"(?: ?(?P<scale>thousand|million|billion|trillion))?(?: ?(?P<unit>[^0-9\s].*))?"
)
_SCALES = {None: 0, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Spellings of units: the first is the name under which they are compared. Only a unit named here
# may stand behind a number whose gold has none, else "21 Jump Street" would match "21".
_UNITS = (
    ("m", "metre", "metres", "meter", "meters"),
    ("km", "kilometre", "kilometres", "kilometer", "kilometers"),
    ("cm", "centimetre", "centimetres", "centimeter", "centimeters"),
    ("mm", "millimetre", "millimetres", "millimeter", "millimeters"),
    ("mi", "mile", "miles"),
    ("ft", "foot", "feet"),
    ("in", "inch", "inches"),
    ("yd", "yard", "yards"),
    ("km2", "km^2", "sq km", "square kilometres", "square kilometers"),
    ("m2", "m^2", "sq m", "square metres", "square meters"),
    ("mi2", "mi^2", "sq mi", "square miles"),
    ("ha", "hectare", "hectares"),
    ("acre", "acres"),
    ("kg", "kilogram", "kilograms", "kilo", "kilos"),
    ("g", "gram", "grams"),
    ("t", "tonne", "tonnes", "metric ton", "metric tons"),
    ("ton", "tons"),
    ("lb", "lbs", "pounds weight"),
    ("oz", "ounce", "ounces"),
    ("l", "litre", "litres", "liter", "liters"),
    ("ml", "millilitre", "millilitres", "milliliter", "milliliters"),
    ("s", "sec", "second", "seconds"),
    ("min", "mins", "minute", "minutes"),
    ("h", "hr", "hrs", "hour", "hours"),
    ("day", "days"),
    ("week", "weeks"),
    ("month", "months"),
    ("year", "years", "yr", "yrs", "years old"),
    ("%", "percent", "per cent"),
    ("km/h", "kmh", "kph", "kilometres per hour", "kilometers per hour"),
    ("mph", "miles per hour"),
    ("m/s", "metres per second", "meters per second"),
    ("°c", "degrees celsius", "celsius"),
    ("°f", "degrees fahrenheit", "fahrenheit"),
    ("k", "kelvin"),
    ("°", "degree", "degrees"),
    ("hz", "hertz"),
    ("w", "watt", "watts"),
    ("kw", "kilowatt", "kilowatts"),
    ("mw", "megawatt", "megawatts"),
    ("hp", "horsepower"),
    ("person", "people", "persons", "inhabitants", "residents"),
    ("time", "times"),
    ("seat", "seats"),
    ("floor", "floors", "storey", "storeys", "stories"),
    ("star", "stars"),
    ("stripe", "stripes"),
    ("colour", "colours", "color", "colors"),
    ("goal", "goals"),
    ("point", "points"),
    ("species",),
)
# Currencies are units too, but a bare sign ("$10") asks for nothing: SPEC 3 sets signs aside.
_CURRENCIES = (
    ("dollar", "dollars", "usd", "us dollar", "us dollars", "$", "us$"),
    ("euro", "euros", "eur", "€"),
    ("pound", "pounds", "gbp", "pounds sterling", "£"),
    ("yen", "jpy", "¥", "jp¥"),
    ("yuan", "cny", "rmb", "renminbi", "cn¥"),
    ("rupee", "rupees", "inr", "₹"),
    ("won", "krw", "₩"),
    ("rouble", "roubles", "ruble", "rubles", "rub", "₽"),
    ("franc", "francs", "chf"),
    ("cent", "cents"),
)
_UNIT_NAME = {spelling: names[0] for names in _UNITS for spelling in names}
_CURRENCY_NAME = {spelling: names[0] for names in _CURRENCIES for spelling in names}


class UnreadableGold(ValueError):
    """No gold alias holds anything to compare with: the row is excluded, never scored."""


@dataclasses.dataclass(frozen=True)
class _Quantity:
    value: decimal.Decimal
    unit: str  # "" where none
    currency: str  # "" where none
    is_sign: bool  # the currency is a bare sign such as "$"


def score_answer(answer: str | None, golds: Sequence[str], scorer: str) -> float:
    """Best score of the answer over the gold aliases.

    Args:
      answer: the final answer, or None where there is none. None and blank score 0 under every
        scorer.
      golds: the truth and its aliases; blank ones are passed over.
      scorer: one of SCORERS. `f1` and `mmsearch_f1` are harmonic means of word precision and
        recall, the others 0 or 1.
    Raises:
      UnreadableGold: no gold is left, as scoring such a row would reward or punish by accident.
      ValueError: unknown scorer.
    """
    if scorer not in SCORERS:
        raise ValueError(f"scorer must be one of {SCORERS}, got {scorer!r}")
    golds = [g for g in golds if g.strip()]
    if not golds:
        raise UnreadableGold("every gold answer is blank")
    if answer is None or not answer.strip():
        return 0.0
    over_all = {
        "em_published": published.em_published,
        "infoseek": published.infoseek,
        "mmsearch_f1": published.mmsearch_f1,
    }
    if scorer in over_all:
        return over_all[scorer](answer, golds)
    if scorer in ("simplevqa", "livevqa"):
        return float(grade_answer(answer, golds) == "correct")
    compare = {"em": _em, "sub_em": _sub_em, "f1": _f1}[scorer]
    return max(float(compare(answer, gold)) for gold in golds)


def grade_answer(answer: str | None, golds: Sequence[str]) -> str:
    """One of published.GRADES by rule: `em` says what is right."""
    return published.grade_by_rule(answer, golds, lambda a, g: score_answer(a, g, "em") >= 1.0)


def score_by_checker(
    checker: Callable[[str, Sequence[str]], bool],
    answer: str | None,
    golds: Sequence[str],
    fallback: str = "em",
) -> tuple[float, bool]:
    """Score by a checker (an LLM judge, a solver); a scorer of ours stands in only where it fails.

    A checker's firm "wrong" stands, even if the strings match.

    Returns:
      The score, and True if the checker raised and `fallback` was used: the caller counts those.
    """
    try:
        return float(bool(checker(answer or "", golds))), False
    except Exception:  # whatever a remote judge raises, it gave no verdict
        return score_answer(answer, golds, fallback), True


def normalise(text: str) -> str:
    """Form under which `em` compares: never "" for a text that is not blank.

    NFKC, casefold, one spelling of dashes and apostrophes; punctuation at the outside of words and
    articles before another word are dropped ("The Who" -> "who", "A" -> "a", "Vitamin A" keeps its
    letter). Decimal points, thousands separators, signs and units stay: numbers are `em`'s
    business.
    """
    # A raised digit is kept apart before NFKC makes 10² into 102.
    text = re.sub(r"([⁰¹²³⁴-⁹]+)", r"^\1", text)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = "".join("-" if _is_dash(c) else c for c in text)
    text = text.translate({0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"'})
    text = re.sub(r"^\s*([+-])\s+(?=[0-9.])", r"\1", text)
    words = [w for w in map(_strip_outer, text.split()) if w]
    kept = [w for i, w in enumerate(words) if w not in _ARTICLES or i == len(words) - 1]
    return " ".join(kept) or " ".join(text.split())


def _em(answer: str, gold: str) -> bool:
    left, right = normalise(answer), normalise(gold)
    if left == right:
        return True
    wanted = _read_quantity(right)
    given = None if wanted is None else _read_quantity(left)
    return given is not None and _is_same_quantity(given, wanted)


def _sub_em(answer: str, gold: str) -> bool:
    words, wanted = _words(answer), _words(gold)
    starts = range(len(words) - len(wanted) + 1)
    return any(words[i : i + len(wanted)] == wanted for i in starts)


def _f1(answer: str, gold: str) -> float:
    given, wanted = _words(answer), _words(gold)
    shared = sum((collections.Counter(given) & collections.Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def _words(text: str) -> list[str]:
    """Words of the normalised text, a number in one spelling ("3,000.0" -> "3000")."""
    words = []
    for word in normalise(text).split():
        quantity = _read_quantity(word)
        is_bare = quantity is not None and not quantity.unit
        words.append(_spell(quantity.value) if is_bare else word)
    return words


def _spell(value: decimal.Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _read_quantity(text: str) -> _Quantity | None:
    """Reads a normalised text that is a number with an optional currency, scale and unit."""
    text = re.sub(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", _join_thousands, text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    # The constructor is exact at any length; Decimal arithmetic would round to 28 digits.
    value = decimal.Decimal(f"{match['number'].replace(',', '')}e{_SCALES[match['scale']]}")
    if "-" in (match["sign"], match["sign2"]):
        value = value.copy_negate()
    unit = " ".join((match["unit"] or "").replace(".", "").split())
    if unit in ("s", "k") and text.endswith(f"{match['number'][-1]}{unit}"):
        return None  # "1990s" is a decade and "5k" a scale, neither a unit
    if match["currency"]:
        currency = _CURRENCY_NAME.get(match["currency"], match["currency"])
        return _Quantity(value, _UNIT_NAME.get(unit, unit), currency, True)
    if unit in _CURRENCY_NAME:
        is_sign = not unit[-1].isalpha()
        return _Quantity(value, "", _CURRENCY_NAME[unit], is_sign)
    return _Quantity(value, _UNIT_NAME.get(unit, unit), "", False)


def _is_same_quantity(given: _Quantity, wanted: _Quantity) -> bool:
    if given.value != wanted.value:
        return False
    if wanted.currency and given.currency != wanted.currency:
        # Another currency is wrong; none at all is right only where the gold's is a bare sign.
        if given.currency or not wanted.is_sign:
            return False
    if wanted.unit:
        return given.unit == wanted.unit
    # "$5m" is no price of 5: beside a currency nothing else is a unit.
    return not given.unit or (given.unit in _UNIT_NAME.values() and not given.currency)


def _join_thousands(match: re.Match) -> str:
    return match.group().replace(" ", "")


def _is_dash(character: str) -> bool:
    return unicodedata.category(character) == "Pd" or character == "\u2212"


def _strip_outer(word: str) -> str:
    """Drops punctuation from a word's edges, but not a sign, a decimal point or a unit."""
    start, stop = 0, len(word)
    while start < stop and _is_outer(word[start]):
        rest = word[start + 1 :]
        if word[start] in "-." and re.match(r"[.$€£¥]?[0-9]", rest):
            break
        start += 1
    while stop > start and _is_outer(word[stop - 1]):
        stop -= 1
    return word[start:stop]


def _is_outer(character: str) -> bool:
    is_punctuation = unicodedata.category(character).startswith("P") or character in "`~^"
    return is_punctuation and character not in _MEANINGFUL
