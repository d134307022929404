"""Wrong answers by the thousand, from seeded templates: what a policy may try that is paid for what looks like the label."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

from runtime.rewards.code import find_rule
from runtime.rewards.rules import RuleContext, attempt

Case = tuple[str, str]  # a reply or an answer, and the label that it is wrong for

# ---------------------------------------------------------------------------------------------------- answers
# @ is the label, ⊛ another number, which does not divide it.

NUMBERS = r"""
0.@ ¦ @ \cdot ⊛ ¦ @! ¦ @ / ⊛ / 7 ¦ x \in \{@, ⊛\} ¦ either @ or ⊛ ¦ @ \quad ⊛ ¦ @ \lor ⊛ ¦ @ | ⊛ ¦ @ maybe ⊛
@ or some other number ¦ @ vs ⊛ ¦ @、⊛ ¦ @到⊛ ¦ from ⊛ to @ ¦ between ⊛ and @ ¦ \ne @ ¦ anything but @ ¦ not equal to @
\neg @ ¦ @ (wrong) ¦ @ is incorrect ¦ it isn't @ ¦ never @ ¦ neither @ nor ⊛ ¦ 不是@ ¦ @是错的 ¦ !@
\text{The answer is not } @ ¦ the value cannot be @ ¦ it might be @ ¦ it is false that x is @ ¦ everything except @
x = \pm @ ¦ \mp @ ¦ ±@ ¦ > @ ¦ \leq @ ¦ x < @ ¦ at least @ ¦ less than @ ¦ up to @ ¦ (-\infty, @] ¦ \{x : x \ge @\}
\mathbb{R} ¦ \{x \in \mathbb{Z} \mid x \le @\} ¦ x is at most $@$ ¦ no more than @ ¦ @ billion ¦ @ dozen ¦ \$@ million ¦ @ bn
@ mil ¦ @ hundred thousand ¦ twice @ ¦ double @ ¦ @ squared ¦ @ cubed ¦ @ factorial ¦ @ halves ¦ @ thirds ¦ @ tenths
@ hundredths ¦ @亿 ¦ @百 ¦ @千 ¦ @ k ¦ @万元 ¦ @ point five ¦ @ over two ¦ @ divided by three ¦ @ times three ¦ @ plus one
@ minus one ¦ @\text{ and a half} ¦ @\text{ or six} ¦ @ \times 10^2 ¦ @×10³ ¦ @个半 ¦ @多 ¦ a third of @ ¦ @ ft ⊛ in
@ hours ⊛ minutes ¦ @\text{ h }⊛\text{ min} ¦ @ h ⊛ min ¦ @'⊛'' ¦ @^\circ ⊛' ¦ @° ⊛' ¦ @ lb ⊛ oz ¦ @ dollars and ⊛ cents
@小时⊛分钟 ¦ @元⊛角 ¦ @ years ⊛ months ¦ @\text{ m }⊛\text{ cm} ¦ @:⊛ ¦ @ feet and ⊛ inches ¦ @\,\mathrm{kg}\,⊛\,\mathrm{g}
@\text{ km} + ⊛\text{ m} ¦ @ remainder ⊛ ¦ \ang{@;⊛} ¦ @\text{ weeks }⊛\text{ days} ¦ @ \approx ⊛ ¦ @ \equiv ⊛ ¦ @ = ⊛.0
@ \to ⊛ ¦ @\pi ¦ @\sqrt2 ¦ @^x ¦ x_@ ¦ f(@) ¦ \log @ ¦ @_{13}1 ¦ \sin @ ¦ @ \bmod 2 ¦ ? ¦ \ldots ¦ unknown ¦ I do not know
none ¦ no solution ¦ \emptyset ¦ \{\} ¦ \text{ } ¦ = ¦ the label ¦ \square ¦ nan ¦ \infty ¦ the same as in the question
see above ¦ \text{@ is the number in the question, the answer is } ⊛ ¦ \frac{@}{0} ¦ ⊛\% ¦ @\text{ percent of }⊛ ¦ @\&⊛
@ * ⊛ ¦ \begin{cases} @ \\ ⊛ \end{cases} ¦ \begin{aligned} @ \\ ⊛ \end{aligned} ¦ \begin{pmatrix} @ \\ ⊛ \end{pmatrix}
\fbox{@} \fbox{⊛} ¦ \underline{@} \underline{⊛} ¦ \boxed{@}, \boxed{⊛} ¦ \cancel{@} ⊛ ¦ \sout{@} ⊛ ¦ @[⊛]
@ \text{ was my first guess, now } ⊛ ¦ @\text{th root of }⊛ ¦ @-th ¦ @或者⊛ ¦ \num{@}\num{⊛} ¦ @\,\Omega\,⊛ ¦ @\mu
@\,\text{m}^{⊛}⊛
"""
# @ is the label, ⊛ another answer of its kind.
FORMULAS = r"""
⊛ \text{ and } @ ¦ @; ⊛ ¦ [@, ⊛] ¦ \ne @ ¦ @ \text{ is wrong} ¦ 2(@) ¦ (@)^2+7 ¦ @ = ⊛ ¦ @ \approx ⊛ ¦ \frac{@}{3}
@ \text{ million} ¦ @ \text{ dozen} ¦ \text{either } @ \text{ or } ⊛ ¦ @ \text{ or something else} ¦ z > @ ¦ z \le @
@ \cup ⊛ ¦ \pm (@) ¦ @, -(@) ¦ z = @ \text{ or } z = ⊛ ¦ \begin{cases} @ \\ ⊛ \end{cases} ¦ @ \text{ ft } ⊛ \text{ in} ¦ @ < ⊛
\emptyset ¦ ? ¦ \text{half of } @ ¦ @ \to ⊛ ¦ \text{the answer is not } @ ¦ @ \text{ over two} ¦ \text{twice } @
\begin{pmatrix} @ \\ ⊛ \end{pmatrix} ¦ \{@\} \cup \{⊛\} ¦ \sqrt{@} + 9 ¦ @ \lor ⊛ ¦ \text{L}
"""
LABELLED = r"""
\frac{3}{7} | \frac{7}{3} ¦ \frac{22}{7} | \pi ¦ 2\sqrt{3} | 3\sqrt{2} ¦ \frac{\pi}{3} | \frac{\pi}{6} ¦ \ln 2 | \ln 3
3+4i | 3-4i ¦ 2^{100} | 2^{101} ¦ e^{2} | e^{-2} ¦ x^2+1 | x^2-1 ¦ \frac{n(n+1)}{2} | \frac{n(n-1)}{2}
\frac{x+1}{x-2} | \frac{x-1}{x+2} ¦ \sqrt{x} | x ¦ 2\sin x | \sin 2x ¦ x^2y | xy^2 ¦ \ln x | \log_2 x ¦ 0.375 | 0.735
12.5 | 1.25 ¦ 0.1\overline{6} | 0.61 ¦ \binom{10}{3} | \binom{10}{4} ¦ \sqrt[3]{5} | \sqrt{5} ¦ 10! | 9! ¦ n! | (n+1)!
\frac{1}{2004!} | \frac{1}{2006!}
"""
# Of labels that are no values: wrong answers for each.
OTHERS = r"""
(1,2) | 1<x\le2 ¦ (1,2) | x=1 or y=2 ¦ (2,\infty) | \{n \in \mathbb{N} : n > 2\} ¦ (2,\infty) | x>2 or x<1
(2,\infty) | \{x \in \mathbb{R} \mid x \ge 2\} ¦ (2,\infty) | 2 ¦ (2,\infty) | (1,\infty)\cap(-\infty,9)
(-\infty,-1)\cup(1,\infty) | x<1 or x>-1 ¦ x \ne 2 | x<2 or x\ge2 ¦ x<5 | x>5 ¦ B | (A) ¦ B | ABCD ¦ B | (B) is wrong
B | not (B) ¦ B | all of the above ¦ B | B) or C) ¦ B | B is incorrect ¦ B | Option B or C ¦ B | Options A, B, C ¦ B | B、C
B | BC ¦ B | either B or D ¦ B | Ben ¦ B | \textbf{(B)}\ 12\ \textbf{(C)}\ 13 ¦ B | B isn't right ¦ B | (B) but maybe (C)
B | ¬B ¦ B | C. because B is wrong ¦ B | non-B ¦ even | uneven ¦ even | neither even nor odd ¦ even | \text{not even}
even | event ¦ Yes | yes/no ¦ Yes | \text{Yes and No} ¦ Yes | maybe ¦ no solution | x=5 ¦ Monday | Tuesday ¦ 1,2,3 | [1,3]
1,2,3 | \{1,\ldots,3\} ¦ \{1,2\} | \{1\},\{2\} ¦ \{1,2\} | 1.5\pm1 ¦ y=2x+1 | y=2x-1 ¦ x^2+y^2=4 | x^2+y^2=16 ¦ 2:3 | 3:2
x=1,y=2 | \begin{aligned}x&=1\\y&=3\end{aligned} ¦ x \equiv 2 \pmod 5 | x = 2 ¦ 2 | 17 \bmod 7 ¦ \pi | 3.14 ¦ \frac13 | 0.333
1011_2 | 1011_3 ¦ \sqrt2 | \sqrt2+10^{-30} ¦ \frac13 | \frac13 + 10^{-30} ¦ mn | |mn| ¦ x | \min(x,10^6) ¦ xy | \sqrt{x^2y^2}
1 | (-1)^{2n+\lfloor n/50 \rfloor} ¦ 7 | 7+\lfloor x/10^9 \rfloor ¦ t | \max(t,-t) ¦ \sin x | |\sin x|
"""


def table(block: str) -> list[str]:
    return [one for line in block.strip("\n").split("\n") for one in line.split(" ¦ ")]


def vanishing(name: str) -> str:
    """A polynomial that is 0 wherever a comparison looks that derives its points from the variable's name alone."""
    points = [zlib.crc32(f"{index} {name}".encode()) % 1999 + 211 for index in range(4)]
    return "".join(f"({name}-\\frac{{{sign}{point}}}{{1000}})" for point in points for sign in ("", "-"))


def numbers(chance: random.Random) -> Iterator[Case]:
    """Wrong answers for whole numbers."""
    for template in ("", " ", *table(NUMBERS)):
        label = chance.choice((chance.randrange(11, 100), chance.randrange(101, 10**4), chance.randrange(10**4, 10**6)))
        other = chance.choice([value for value in range(4, 18) if label % value])
        yield template.replace("@", str(label)).replace("⊛", str(other)), str(label)


def formulas(chance: random.Random) -> Iterator[Case]:
    """And for labels of other kinds."""
    labelled = [one.split(" | ") for one in table(LABELLED)]
    for template in table(FORMULAS):
        label, other = chance.choice(labelled)
        yield template.replace("@", label).replace("⊛", other), label
    for one in table(OTHERS):
        label, _, answer = one.partition(" | ")
        yield answer, label
    name = chance.choice("abxyzt")
    yield f"{name}+{vanishing(name)}", name


# ---------------------------------------------------------------------------------------------------- replies
# § is the answer, @ the label, ¶ a sentence that names the label and is no answer.

SENTENCES = "We are given @.|Is it @?|First I thought of @.|There are @ of them in the question.|@|It could be @.|Not @."
BOXED = (
    "\\boxed{§}|¶ So \\boxed{§}.|\\boxed{@}, no: \\boxed{§}|\\boxed{§} ¶|The answer is @. \\boxed{§}|#### @\n\\boxed{§}"
    "|\\fbox{@}\n\\fbox{§}"
)
LOOKS = (
    "§|$§$|\\text{§}|z = §|\\underline{§}|**§**|{§}|The answer is $§$|\\(§\\)|\\left(§\\right)|\\displaystyle §|Answer: §|§."
    "|\\mathbf{§}|\\mathrm{§}|\\boldsymbol{§}|\\textbf{§}|\\color{red}{§}|$$§$$|\\[§\\]|So the answer is §|\\fbox{§}"
    "|\\begin{aligned}§\\end{aligned}"
)
MARKED = f"{BOXED}|¶\n#### §|<answer>@</answer> <answer>§</answer>|#### @\n#### §|<answer>¶</answer>#### §|¶ The answer is $§$"
UNMARKED = (
    "¶|@|$@$|The answer is not @|I do not think the answer is @.|The answer is at least @|The answer is @ or 7|##### @"
    "|The answer is less than @|The answer is between 1 and @|The answer is unknown. ¶|\\boxed{@|答案不是@|答案是@或7|\\boxed{"
    "|The answer isn't @|<answer>@|####\n@|It is wrong that the answer is @|The answer is half of @|The answer is @ million"
    "|我不认为答案是@|I doubt that the answer is @|The answer was never @|The answer: not @|Final answer: @ or @1|answer @"
    "|answer: more than @|\\boxed{}@"
)
THOUGHT = (
    "<think>¶</think><answer>\\boxed{§}</answer>|<think>\\boxed{@}</think><answer>\\boxed{§}</answer>"
    "|<think>¶</think>\n<answer>\\boxed{§}</answer>"
)
LINES = "Answer: §|¶\nAnswer: §|Answer: @\nAnswer: §|The answer is @|@|Answer @|Answer:|¶"
ENDS = "§ 7|¶ 7|§, or 1|@ or 7|@ = 8 + 1|@.001|@1|-@|1@|@/7|@ and 1|,|The first is @, the second 2"

Rule = tuple[Callable[[random.Random], Iterator[Case]], str]


def both(chance: random.Random) -> Iterator[Case]:
    cases = [*numbers(chance), *formulas(chance)]
    chance.shuffle(cases)
    yield from cases


RULES: dict[str, Rule] = {
    **dict.fromkeys(("gsm8k", "gsm8k_answer"), (numbers, f"{MARKED}|{UNMARKED}")),
    "math": (both, f"{MARKED}|{UNMARKED}"),
    "boxed": (both, BOXED),
    "expr": (both, LOOKS),
    **dict.fromkeys(("acc", "math_17k_acc", "r1_zero_acc"), (both, f"{BOXED}|{THOUGHT}|{UNMARKED}")),
    "base_acc": (both, f"{THOUGHT}|{BOXED}|\\boxed{{@}}|<think>¶</think><answer>@</answer>|<answer>\\boxed{{@}}</answer>"),
    "acc_for_dapo": (numbers, LINES),
    "last_number": (numbers, ENDS),
}


def wrong(rule: str, count: int, seed: int = 0) -> Iterator[Case]:
    """`count` replies that are wrong for their labels."""
    made, frames = RULES[rule]
    chance = random.Random(f"{rule} {seed}")
    given = 0
    while given < count:
        for answer, label in made(chance):
            frame = chance.choice(frames.split("|"))
            if not answer.strip() and "#### @" in frame:
                continue  # the last mark that something follows counts
            sentence = chance.choice(SENTENCES.split("|"))
            yield frame.replace("¶", sentence).replace("@", label).replace("§", answer), label
            given += 1
            if given == count:
                return


def accepted(rule: str, reply: str, label: str) -> bool:
    """Whether the rule pays for it, by its screen or its whole function. What it refuses earns nothing."""
    found = find_rule(rule)
    for function in (found.evaluate, found.screen):
        assert function is not None
        outcome = attempt(function, reply, label, RuleContext())  # type: ignore[arg-type]  # none is async
        if outcome.value is not None and float(outcome.value) > 0:
            return True
    return False
