"""Words and commands with a meaning in answers."""

from __future__ import annotations


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


TRIGONOMETRIC = _words("sin cos tan cot sec csc")
PREFIXED = TRIGONOMETRIC | _words("sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc ln log log10 exp")
"""Functions whose argument may stand behind them without brackets."""
LISTED = _words("max min gcd lcm floor ceil abs")
"""Functions of what is in brackets."""
SPELLED_FUNCTIONS = PREFIXED | LISTED | _words("asin acos atan lg sqrt")
"""Functions in answers that are written without backslashes."""
SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}

SPELLED_SYMBOLS = {
    **{name: f"\\{name}" for name in _words("pi alpha beta gamma delta epsilon theta lambda phi omega infty cup cbrt")},
    "inf": "\\infty",
    "infinity": "\\infty",
}
CONNECTIVES = _words("and or")
UNITS = _words(
    "mm cm dm km ft yd mi nm kg mg lb lbs oz ml mL cL dL kL hr hrs min mins sec secs ms Hz kHz MHz GHz Pa kPa eV keV MeV GeV",
    "kJ kW kWh mph kmh kph rad deg pm am pct AU pc kpc Mpc mol cc sq in",
)
"""Short ones; longer words need no list."""
PERCENT = _words("percent pct")
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

ACCENTS = _words(
    r"\overline \bar \vec \hat \widehat \tilde \dot \ddot \overrightarrow \overleftrightarrow \underline",
    r"\mathbb \mathcal \mathfrak \mathscr \stackrel \overset",
)
"""Commands that make another symbol of what they are put on."""
UNREAD = _words(r"\int \iint \oint \lim \limsup \liminf \sup \inf \mod \pmod \bmod \det \choose \atop")
"""Commands whose meaning is left to algebra."""
MATRICES = _words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")

NO_SOLUTION = frozenset(
    ("no solution", "no solutions", "none", "empty set", "the empty set", "no real solution", "no real solutions")
)
ALL_REALS = frozenset(("all real numbers", "all reals", "all real"))
NOT_PROSE = SPELLED_FUNCTIONS | CONNECTIVES | _words("pi mod infinity inf")
"""Words that do not make prose of an answer."""
