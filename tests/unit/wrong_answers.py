"""Wrong answers by the thousand, from seeded templates: what a policy may try that is paid for whatever looks like the label.

python -m tests.unit.wrong_answers [COUNT]     the share of them that each rule takes, and that math-verify takes
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator

from benchmarks.rewards_trial import RewardCase, plain
from runtime.rewards.catalogue import find_rule
from runtime.rewards.rules import RuleContext, attempt

Case = tuple[str, str]  # a reply or an answer, and the label that it is wrong for

# ---------------------------------------------------------------------------------------------------- answers
# @ is the label, ⊛ another number, which does not divide it.

NUMBERS = r"""
⊛ ¦ -@ ¦ @1 ¦ 1@ ¦ @.001 ¦ @.5 ¦ 0.@ ¦ @/⊛ ¦ ⊛/@ ¦ @,⊛ ¦ \frac{@}{⊛} ¦ @ - ⊛ ¦ @ + ⊛ ¦ @ \cdot ⊛ ¦ @^2 ¦ @! ¦ \sqrt{@}
@+10^{-40} ¦ @ or ⊛ ¦ ⊛ or @ ¦ @ and ⊛ ¦ @, ⊛ ¦ ⊛, @ ¦ @; ⊛ ¦ \{@, ⊛\} ¦ @ \text{ or } ⊛ ¦ @\text{, or }⊛ ¦ (@, ⊛) ¦ @ / ⊛ / 7
⊛, @, -@, 0, 1, 2 ¦ x=@ or x=⊛ ¦ x = @, x = ⊛ ¦ x \in \{@, ⊛\} ¦ either @ or ⊛ ¦ @ ⊛ ¦ @ \quad ⊛ ¦ @ \lor ⊛ ¦ @ | ⊛
@ maybe ⊛ ¦ @ or some other number ¦ @ vs ⊛ ¦ @ 或 ⊛ ¦ @或⊛ ¦ @、⊛ ¦ @到⊛ ¦ @ to ⊛ ¦ from ⊛ to @ ¦ between ⊛ and @
⊛ \le x \le @ ¦ [@, ⊛] ¦ (⊛, @) ¦ @..⊛ ¦ @ \ldots ⊛ ¦ not @ ¦ \text{not } @ ¦ \ne @ ¦ x \ne @ ¦ @ is wrong
@ is not the answer ¦ @\text{ is wrong} ¦ anything but @ ¦ not equal to @ ¦ \neg @ ¦ @ (wrong) ¦ @ is incorrect ¦ it is not @
it isn't @ ¦ never @ ¦ neither @ nor ⊛ ¦ x is not $@$ ¦ the answer is not $@$ ¦ 不是@ ¦ @是错的 ¦ !@
\text{The answer is not } @ ¦ the value cannot be @ ¦ it might be @ ¦ it is false that x is @ ¦ @, not ⊛ ¦ ⊛, not @
everything except @ ¦ \pm @ ¦ @, -@ ¦ x = \pm @ ¦ @ \text{ or } -@ ¦ -@, @ ¦ \mp @ ¦ \{-@, @\} ¦ @ \pm 1 ¦ ±@ ¦ x > @
x \ge @ ¦ > @ ¦ \ge @ ¦ \leq @ ¦ x < @ ¦ at least @ ¦ at most @ ¦ more than @ ¦ less than @ ¦ \text{at least } @ ¦ up to @
over @ ¦ @+ ¦ (-\infty, @] ¦ [@, \infty) ¦ \{x : x \ge @\} ¦ \mathbb{R} ¦ \mathbb{N} ¦ \{x \in \mathbb{Z} \mid x \le @\}
x is at most $@$ ¦ @ or more ¦ no more than @ ¦ @ hundred ¦ @ thousand ¦ @ million ¦ @ billion ¦ @ dozen ¦ @\text{ million}
\$@ million ¦ @ bn ¦ @ mil ¦ @ hundred thousand ¦ @\text{ thousand} ¦ half of @ ¦ twice @ ¦ double @ ¦ @ squared ¦ @ cubed
@ factorial ¦ @ halves ¦ @ thirds ¦ @ tenths ¦ @ hundredths ¦ @万 ¦ @亿 ¦ @百 ¦ @千 ¦ @ k ¦ @万元 ¦ @ point five ¦ @ over two
@ divided by three ¦ @ times three ¦ @ plus one ¦ @ minus one ¦ @ and a half ¦ @\frac12 ¦ @ 1/2 ¦ @\text{ and a half}
@\text{ plus one} ¦ @\text{ halves} ¦ @\text{ dozen} ¦ @\text{ or six} ¦ @ \text{ k} ¦ @e3 ¦ @ \times 10^2 ¦ @×10³ ¦ @个半
@多 ¦ a third of @ ¦ @\text{ squared} ¦ @ ft ⊛ in ¦ @\text{ ft }⊛\text{ in} ¦ @ hours ⊛ minutes ¦ @\text{ h }⊛\text{ min}
@ h ⊛ min ¦ @'⊛'' ¦ @^\circ ⊛' ¦ @° ⊛' ¦ @ lb ⊛ oz ¦ @ dollars and ⊛ cents ¦ @\text{ hours and }⊛\text{ minutes} ¦ @小时⊛分钟
@元⊛角 ¦ @ km ⊛ m ¦ @ years ⊛ months ¦ @\text{ m }⊛\text{ cm} ¦ @:⊛ ¦ @ feet and ⊛ inches ¦ \$@ and ⊛ cents
@\,\mathrm{kg}\,⊛\,\mathrm{g} ¦ @\text{ km} + ⊛\text{ m} ¦ @\text{ lb }⊛ ¦ @\text{ R }⊛ ¦ @ remainder ⊛ ¦ \ang{@;⊛} ¦ @^o ⊛'
@\text{ weeks }⊛\text{ days} ¦ @ = ⊛ ¦ x = @ = ⊛ ¦ @ \approx ⊛ ¦ x \approx @ \approx ⊛ ¦ @ > ⊛ ¦ @ < ⊛ ¦ ⊛ = ⊛ = ⊛
@ \equiv ⊛ ¦ ⊛ \approx ⊛ ¦ x = ⊛ ¦ @ = ⊛.0 ¦ @ \to ⊛ ¦ @ \ne ⊛ ¦ @x ¦ @ x ¦ @ + x ¦ x - @ ¦ @ i ¦ @\pi ¦ @\sqrt2 ¦ @ e ¦ @^x
x_@ ¦ f(@) ¦ f(x) + @ ¦ \log @ ¦ x ¦ @^{-1} ¦ @_{13}1 ¦ \sin @ ¦ x^@ ¦ @ \bmod 2 ¦ ? ¦ ... ¦ \ldots ¦ unknown ¦ I do not know
N/A ¦ none ¦ no solution ¦ \emptyset ¦ \{\} ¦ () ¦ \text{ } ¦ = ¦ the label ¦ \square ¦ nan ¦ \infty ¦ x = x
the same as in the question ¦ see above ¦ answer ¦ \text{@ is the number in the question, the answer is } ⊛ ¦ \frac{@}{0}
@/0 ¦ ⊛\% ¦ @ \% of ⊛ ¦ @\text{ percent of }⊛ ¦ @\text{, }⊛ ¦ @\text{ and }⊛ ¦ @\&⊛ ¦ @ \times ⊛ ¦ @ * ⊛ ¦ @, @ ¦ @, @, @
\begin{cases} @ \\ ⊛ \end{cases} ¦ \begin{aligned} @ \\ ⊛ \end{aligned} ¦ \begin{pmatrix} @ \\ ⊛ \end{pmatrix}
\fbox{@} \fbox{⊛} ¦ \underline{@} \underline{⊛} ¦ \boxed{@}, \boxed{⊛} ¦ \cancel{@} ⊛ ¦ \sout{@} ⊛ ¦ @ \text{ (or } ⊛) ¦ @(⊛)
@[⊛] ¦ @ \text{ was my first guess, now } ⊛ ¦ @^{\text{th}} ⊛ ¦ @\text{th root of }⊛ ¦ @-th ¦ @元或⊛元 ¦ @或者⊛
\num{@}\num{⊛} ¦ @\,\Omega + ⊛\,\Omega ¦ @\,\Omega\,⊛ ¦ @\mu ¦ @\,\text{m}^{⊛}⊛
"""
# @ is the label, ⊛ another answer of its kind.
FORMULAS = r"""
⊛ ¦ @, ⊛ ¦ ⊛, @ ¦ @ \text{ or } ⊛ ¦ ⊛ \text{ and } @ ¦ \{@, ⊛\} ¦ (@, ⊛) ¦ @; ⊛ ¦ [@, ⊛] ¦ \text{not } @ ¦ \ne @ ¦ z \ne @
@ \text{ is wrong} ¦ 2(@) ¦ (@)+1 ¦ (@)^2+7 ¦ @ = ⊛ ¦ @ \approx ⊛ ¦ @ + ⊛ + 9 ¦ \frac{@}{3} ¦ @ \text{ million}
@ \text{ dozen} ¦ \text{either } @ \text{ or } ⊛ ¦ @ \text{ or something else} ¦ z > @ ¦ z \le @ ¦ @ \cup ⊛ ¦ \pm (@)
@, -(@) ¦ @ \pm 1 ¦ z = @ \text{ or } z = ⊛ ¦ \begin{cases} @ \\ ⊛ \end{cases} ¦ @ \text{ ft } ⊛ \text{ in} ¦ @ \ne ⊛ ¦ @ < ⊛
z @ ¦ @ + z ¦ \emptyset ¦ ? ¦ \text{half of } @ ¦ @ \to ⊛ ¦ \text{the answer is not } @ ¦ @ \text{ over two} ¦ \text{twice } @
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
(1,2) | (2,1) ¦ (1,2) | [1,2] ¦ (1,2) | 1<x\le2 ¦ (1,2) | (1,2) \text{ or } (3,4) ¦ (1,2) | (1,3) ¦ (1,2) | \mathbb{R}
(1,2) | x>1 ¦ (1,2) | (1,2),(2,1) ¦ (1,2) | x=1 or y=2 ¦ (1,2) | \{1,2\} ¦ (2,\infty) | x\ge 2
(2,\infty) | \{x \in \mathbb{Z} \mid x>2\} ¦ (2,\infty) | \{n \in \mathbb{N} : n > 2\} ¦ (2,\infty) | x>2 or x<1
(2,\infty) | x \ne 2 ¦ (2,\infty) | [2,\infty) ¦ (2,\infty) | x<2 ¦ (2,\infty) | \mathbb{R} ¦ (2,\infty) | x>3
(2,\infty) | \{2\} \cup (2,\infty) ¦ (2,\infty) | \{x \in \mathbb{R} \mid x \ge 2\} ¦ (2,\infty) | (2, 10^{100})
(2,\infty) | 2 ¦ (2,\infty) | (1,\infty)\cap(-\infty,9) ¦ (-\infty,-1)\cup(1,\infty) | x\le-1 or x>1
(-\infty,-1)\cup(1,\infty) | x<-1 and x>1 ¦ (-\infty,-1)\cup(1,\infty) | -1<x<1 ¦ (-\infty,-1)\cup(1,\infty) | x<1 or x>-1
(-\infty,-1)\cup(1,\infty) | x>1 ¦ (-\infty,-1)\cup(1,\infty) | x<-1 or x>1 or x=0 ¦ (-\infty,-1)\cup(1,\infty) | x\ne1
(-\infty,-1)\cup(1,\infty) | x<-1, y>1 ¦ (-\infty,-1)\cup(1,\infty) | \mathbb{R} ¦ (-\infty,-1)\cup(1,\infty) | (-1,1)
x \ne 2 | x=2 ¦ x \ne 2 | x<2 ¦ x \ne 2 | x<2 or x\ge2 ¦ x \ne 2 | x \ne 3 ¦ x<5 | x>5 ¦ x<5 | x\le5 ¦ x<5 | x<5 or x>6
x<5 | 5 ¦ x<5 | x<5, x>5 ¦ x > 2 \text{ and } x < 5 | x>2 or x<5 ¦ 2<x<5 | x>2 ¦ B | A ¦ B | (A) ¦ B | A. 12 ¦ B | A, B
B | (A) or (B) ¦ B | A) B) C) D) ¦ B | ABCD ¦ B | (A)(B)(C)(D) ¦ B | not B ¦ B | (B) is wrong ¦ B | B and C ¦ B | B/C
B | A or B ¦ B | (B), (C) ¦ B | not (B) ¦ B | B. C. ¦ B | neither A nor B ¦ B | all of the above ¦ B | B) or C) ¦ B | (B) (C)
B | B: 12, C: 13 ¦ B | A. B ¦ B | B is incorrect ¦ B | (A) B ¦ B | Option B or C ¦ B | Options A, B, C ¦ B | B、C ¦ B | 12
B | B. wrong ¦ B | BC ¦ B | b, c ¦ B | either B or D ¦ B | B>A ¦ B | B = A ¦ B | Ben ¦ B | \text{(B) or (C)}
B | \textbf{(B)}\ 12\ \textbf{(C)}\ 13 ¦ B | B isn't right ¦ B | [A] [B] ¦ B | (B) but maybe (C) ¦ B | ¬B ¦ B | \{A, B\}
B | C. because B is wrong ¦ B | non-B ¦ even | odd ¦ even | even or odd ¦ even | not even ¦ even | even, odd ¦ even | even/odd
even | uneven ¦ even | neither even nor odd ¦ even | \text{not even} ¦ even | \text{even or odd} ¦ even | event
even | even and odd ¦ Yes | No ¦ Yes | yes or no ¦ Yes | not yes ¦ Yes | yes/no ¦ Yes | yes, no ¦ Yes | \text{Yes and No}
Yes | maybe ¦ no solution | 0 ¦ no solution | x=5 ¦ no solution | \mathbb{R} ¦ Monday | Tuesday ¦ Monday | not Monday
1,2,3 | 1,2 ¦ 1,2,3 | 1,2,3,4 ¦ 1,2,3 | 1 or 2 ¦ 1,2,3 | [1,3] ¦ 1,2,3 | \{1,\ldots,3\} ¦ 1,2,3 | 123 ¦ 1,2,3 | 1,1,2,3
1,2,3 | 1\le x\le3 ¦ \{1,2\} | (1,2) ¦ \{1,2\} | \{1\},\{2\} ¦ \{1,2\} | x>0 ¦ \{1,2\} | 1.5\pm1 ¦ y=2x+1 | y=2x-1
y=2x+1 | 2x+1=0 ¦ y=2x+1 | y>2x+1 ¦ y=2x+1 | y=2x+1, y=3x ¦ x^2+y^2=4 | x^2+y^2=16 ¦ 2:3 | 3:2 ¦ x=1,y=2 | x=2,y=1
x=1,y=2 | \begin{aligned}x&=1\\y&=3\end{aligned} ¦ x=1,y=2 | x=1 or y=2 ¦ x \equiv 2 \pmod 5 | x \equiv 3 \pmod 5
x \equiv 2 \pmod 5 | x \equiv 2 \pmod 7 ¦ x \equiv 2 \pmod 5 | x = 2 ¦ 2 | x \equiv 7 \pmod 5 ¦ 2 | 17 \bmod 7 ¦ \pi | 3.14
\pi | 3.1416 ¦ \frac13 | 0.333 ¦ 1011_2 | 1011_3 ¦ 90 | 90\pi ¦ \sqrt2 | \sqrt2+10^{-30} ¦ \frac13 | \frac13 + 10^{-30}
\pi | \pi + 10^{-30} ¦ e^2 | e^2+10^{-60} ¦ 10-x | |x-10| ¦ 10 | \max(x,10) ¦ 10-x | \sqrt{(x-10)^2}
7 | 7+\lfloor n/40 \rfloor ¦ n | n + \lfloor n/10^5 \rfloor ¦ c | |c| ¦ b | |b| ¦ mn | |mn| ¦ x | \min(x,10^6) ¦ xy | |x||y|
xy | \sqrt{x^2y^2} ¦ x-3 | |x-3| ¦ 7 | 7+|x|-x ¦ n | n \bmod 1000 ¦ 1 | (-1)^{2n+\lfloor n/50 \rfloor} ¦ x | \frac{x^2}{|x|}
a^2 | a|a| ¦ x+1 | x+1+10^{-50}x ¦ 7 | 7+\lfloor x/10^9 \rfloor ¦ 1 | \frac{|x+10|}{x+10} ¦ t | \max(t,-t) ¦ \sin x | |\sin x|
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


def main() -> None:
    judge = plain()
    for rule in RULES:
        cases = list(wrong(rule, int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
        taken = [case for case in cases if accepted(rule, *case)]
        kind = "expr" if rule == "expr" else "boxed"
        theirs = sum(judge(RewardCase(kind, reply, label, False)) for reply, label in cases)
        print(f"{rule:14} takes {len(taken)} of {len(cases)}, math-verify {theirs}", *taken[:20], sep="\n    ")


if __name__ == "__main__":
    main()
