"""Replies made to hang, exhaust or take over whoever judges them. `python -m tests.system.hostile_replies` runs them all,
or with a number N each N-th.

Each goes through every verifier, in the real pool, with no screen before it; what is printed is a `Report` in JSON.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from runtime.rewards.code import find_rule
from runtime.rewards.pool import KillablePool, Limits
from runtime.rewards.rules import RULES, RuleContext, RuleOutcome, attempt
from runtime.rewards.worker import Task, Verdict

LIMITS = Limits(seconds=4.0, cpu_seconds=2.0, memory_bytes=384 << 20)  # memory as by default; less time, for the test's sake
WORKERS = 2
TOUCHED = "touched"  # what the code in these replies would make
LONG = 2_000_000


class Hostile(Struct, frozen=True):
    """An answer, or with `whole` a reply; and the label that it is held against."""

    name: str
    answer: str
    label: str = "5"
    whole: bool = False

    def reply(self, verifier: str) -> str:
        if self.whole or verifier == "expr":
            return self.answer
        return f"<think>so</think>\n<answer>\\boxed{{{self.answer}}}</answer>" if verifier in TAGGED else self._marked()

    def _marked(self) -> str:
        return f"\\boxed{{{self.answer}}}\n#### {self.answer}\nAnswer: {self.answer}"


TAGGED = ("base_acc", "strict_format", "r1_zero_format", "format")


class Ending(Struct):
    """How one verifier did on one reply, whose screen has ended too."""

    name: str
    verifier: str
    value: float | None
    error: str


def algebra() -> Iterator[Hostile]:
    """Mathematics that is short to write and endless to evaluate."""
    yield Hostile("tower of nines", "9^{9^{9^{9^{9}}}}", "9^{9^{9^{9^{8}}}}")
    yield Hostile("tower of 60 twos", "2^{" * 60 + "2" + "}" * 60, "2^{" * 59 + "2" + "}" * 59)
    yield Hostile("tower of powers of sums", "(1+1)^{" * 30 + "x" + "}" * 30, "2^{" * 30 + "x" + "}" * 30)
    yield Hostile("negative tower", "2^{-2^{2^{2^{2^{9}}}}}", "0")
    yield Hostile("tower without braces", "9**9**9**9**9", "9**9**9")
    yield Hostile("factorial of factorials", "((((9!)!)!)!)!", "(((9!)!)!)!")
    yield Hostile("factorial of 10^9", "1000000000!", "999999999!")
    yield Hostile("many factorials", "3" + "!" * 500, "3!")
    yield Hostile("binomial of 10^12", "\\binom{1000000000000}{500000000000}", "\\binom{1000000000000}{499999999999}")
    yield Hostile("power with a million digits", "7^{1000000}", "7^{1000000}+1")
    yield Hostile("number with a million digits", "9" * 1_000_000, "9" * 1_000_000 + "0")
    yield Hostile("giant decimal", "0." + "3" * LONG, "\\frac{1}{3}")
    yield Hostile("giant exponent", "1e999999999", "1e999999998")
    yield Hostile("product of 5000 brackets", "".join(f"(x+{i})" for i in range(5000)), "x^{5000}")
    yield Hostile("power of a sum", "(a+b+c+d+e+f)^{500}", "(f+e+d+c+b+a)^{500}+1")
    yield Hostile("deep fraction", "\\frac{1}{1+" * 400 + "x" + "}" * 400, "x")
    yield Hostile("deep roots", "\\sqrt{2+" * 300 + "2" + "}" * 300, "2")
    yield Hostile("deep parentheses", "(" * 5000 + "5" + ")" * 5000)
    yield Hostile("deep brackets, unclosed", "([{" * 50_000)
    yield Hostile("deep left and right", "\\left(" * 3000 + "5" + "\\right)" * 3000)
    yield Hostile("sum to infinity", "\\sum_{n=1}^{\\infty} \\frac{\\sin(n^n)}{n^{n!}}", "\\pi")
    yield Hostile("product of a sum of a product", "\\prod_{i=1}^{10^{9}} \\sum_{j=1}^{10^{9}} (i^j+j!)")
    yield Hostile("an integral nobody can solve", "\\int_0^{\\infty} \\frac{e^{-x^x} \\sin(x^{x})}{\\ln(1+x!)} dx", "1")
    yield Hostile("a limit of a tower", "\\lim_{x \\to \\infty} x^{x^{x^{x}}} / x!^{x!}", "\\infty")
    yield Hostile("nested logarithms and sines", "\\sin(\\cos(\\tan(" * 60 + "x" + ")))" * 60, "x")
    yield Hostile("huge matrix", matrix(300), matrix(300).replace("7", "8", 1))
    yield Hostile("power of a matrix", f"{matrix(20)}^{{1000000}}", matrix(20))
    yield Hostile("determinant of a symbolic matrix", f"\\det{matrix(9, 'x_{%d}')}", "0")
    yield Hostile("list of 20,000", ",".join(map(str, range(20_000))), ",".join(map(str, range(20_000, 0, -1))))
    yield Hostile("set of 400 formulas", sums(400), sums(400)[::-1])
    yield Hostile("plus-minus 40 times", "\\pm 1" * 40, "\\pm 2" * 40)
    yield Hostile("polynomial of degree 10^9", "x^{1000000000}-1=0", "x^{999999999}-1=0")
    yield Hostile("chain of inequalities", "x" + "<x+1" * 3000, "x<1")
    yield Hostile("union of 2000 intervals", "\\cup".join(f"({i},{i + 1})" for i in range(2000)), "(0,2000)")
    yield Hostile("base with a million digits", "1" * 1_000_000 + "_{2}", "1")
    yield Hostile("gcd of repunits", f"\\gcd({'1' * 5000},{'1' * 4999})", "1")


def matrix(size: int, cell: str = "7") -> str:
    rows = ("&".join(cell % (row * size + i) if "%" in cell else cell for i in range(size)) for row in range(size))
    return "\\begin{pmatrix}" + "\\\\".join(rows) + "\\end{pmatrix}"


def sums(count: int) -> str:
    return "\\{" + ",".join(f"\\sqrt{{{i}}}+x^{{{i}}}" for i in range(count)) + "\\}"


def bulk() -> Iterator[Hostile]:
    """Two megabytes, arranged against one expression or the other."""
    generator = random.Random(0)
    pieces = (
        "{",
        "}",
        "\\boxed{",
        "\\",
        "$",
        "#",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        " ",
        "\n",
        "answer is ",
        "1",
        ",",
    )
    texts = {
        "2 MB of letters": "x" * LONG,
        "2 MB of digits": "7" * LONG,
        "2 MB of spaces": " " * LONG,
        "2 MB of newlines": "\n" * LONG,
        "2 MB of backslashes": "\\" * LONG,
        "2 MB of dollars": "$" * LONG,
        "2 MB of commas": "1," * (LONG // 2),
        "2 MB of signs": "-" * LONG,
        "2 MB at random": "".join(generator.choices(pieces, k=LONG // 4)),
        "boxes, 250,000 of them": "\\boxed{1}" * 250_000,
        "boxes within boxes": "\\boxed{" * 100_000 + "5" + "}" * 100_000,
        "boxes, never closed": "\\boxed{" * 280_000,
        "boxes and spaces": "\\boxed        " * 140_000,
        "braces, never closed": "\\boxed{" + "{" * LONG,
        "braces, never opened": "\\boxed{5" + "}" * LONG,
        "hashes": "#" * LONG,
        "hashes and spaces": "#### " * 400_000,
        "closing statements": "the answer is " * 140_000,
        "closing statements without an end": "Answer" + ":*_ " * 500_000,
        "thoughts": "<think>" + "</think><answer>" * 120_000,
        "spaces behind thoughts": "<think>" + ("</think>" + " " * 2000) * 1000,
        "steps": "Step " + "1" * LONG,
        "fractions": "\\frac" * 400_000,
        "text commands": "\\text{" * 300_000,
        "a number with a comma and no end": "1" + ",000" * 500_000,
    }
    for name, text in texts.items():
        yield Hostile(name, text, whole=True)
        if "box" not in name:
            yield Hostile(f"{name}, in a box", f"\\boxed{{{text[:300_000]}}}", whole=True)


def code() -> Iterator[Hostile]:
    """Code in several dialects that would make a file, were it carried out."""
    for name, text in {
        "python's import": f"__import__('os').system('touch {TOUCHED}')",
        "python's open": f"open('{TOUCHED}', 'w').write('x')",
        "python's lambda": f"(lambda: open('{TOUCHED}', 'w'))()",
        "python's exec": f"exec(\"open('{TOUCHED}', 'w')\")",
        "python's subclasses": f"().__class__.__bases__[0].__subclasses__()[0]; open('{TOUCHED}', 'w')",
        "sympify": f"sympify(\"__import__('pathlib').Path('{TOUCHED}').touch()\")",
        "sympify, as a symbol": f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{TOUCHED}','w')",
        "sympify, in a power": f"2**__import__('os').system('touch {TOUCHED}')",
        "an f-string": f"{{open('{TOUCHED}', 'w')}}",
        "LaTeX's write18": f"\\immediate\\write18{{touch {TOUCHED}}}",
        "LaTeX's input": f'\\input{{|"touch {TOUCHED}"}}',
        "LaTeX's openout": f"\\newwrite\\f \\immediate\\openout\\f={TOUCHED} \\immediate\\write\\f{{x}}",
        "LaTeX's def": "\\def\\a{\\a\\a}\\a",
        "operatorname": f"\\operatorname{{__import__('os').system('touch {TOUCHED}')}}(1)",
        "text command": f"\\text{{__import__('os').system('touch {TOUCHED}')}}",
        "shell": f"$(touch {TOUCHED}) `touch {TOUCHED}` ; touch {TOUCHED} | touch {TOUCHED}",
        "YAML": f"!!python/object/apply:os.system ['touch {TOUCHED}']",
        "pickle": f"cos\nsystem\n(S'touch {TOUCHED}'\ntR.",
        "a template": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% import os %}",
    }.items():
        yield Hostile(name, text)


def characters() -> Iterator[Hostile]:
    """Text that is not what it looks like, or no text at all."""
    for name, text in {
        "nothing": "",
        "NUL bytes": "\0" * 1000 + "5" + "\0" * 1000,
        "NUL in a box": "\0\\boxed{\0 5\0}",
        "broken UTF-8": (b"\xff\xfe\x80\\boxed{5" + b"\xc3\x28\xe2\x82" * 1000 + b"}").decode("utf-8", "replace"),
        "halves of surrogate pairs": "\\boxed{\ud83d" * 100 + "\udc00" * 1000,
        "right-to-left marks": "\\boxed{\u202e5\u202d\u2066}\u200f" * 100,
        "combining marks": "\\boxed{5" + "\u0301" * 100_000 + "}",
        "spaces of every width": "\\boxed{" + "".join(map(chr, (*range(0x2000, 0x2010), 0x3000, 0xFEFF))) * 1000 + "5}",
        "digits of every script": "\\boxed{" + "".join(chr(i) for i in range(0x110000) if chr(i).isdigit()) + "}",
        "every character": "\\boxed{" + "".join(map(chr, range(0xD800))) + "}",
        "emoji": "\\boxed{" + "\U0001f469\u200d\U0001f469" * 50_000 + "}",
        "case that grows": "\\boxed{\\text{" + "\u0130\ufb03\u1e9e" * 50_000 + "}}",
    }.items():
        yield Hostile(name, text, whole=True)


def hostile_replies() -> list[Hostile]:
    return [*algebra(), *bulk(), *code(), *characters()]


class Report(Struct):
    peak_bytes: int  # resident, of the largest worker
    endings: list[Ending]


async def run(every: int) -> list[Ending]:
    """Each `every`-th reply through every verifier; the pool must still serve when all is over."""
    names = list(RULES)
    pool = KillablePool(names, WORKERS, LIMITS)
    endings = []
    try:
        for hostile in hostile_replies()[::every]:
            tasks = [Task(name, hostile.reply(name), hostile.label, RuleContext()) for name in names]
            for task in tasks:
                _screen(task)
            futures = [pool.submit(task) for task in tasks]
            for task, verdict in zip(tasks, await asyncio.gather(*futures), strict=True):
                endings.append(_ending(hostile, task, verdict))
        good = await pool.run([Task("math", "\\boxed{\\frac{10}{2}}", "5", RuleContext())])
        assert good == [RuleOutcome(True)], good
    finally:
        await pool.close()
    return endings


def _ending(hostile: Hostile, task: Task, verdict: Verdict) -> Ending:
    outcome = verdict.outcome
    value = None if outcome.value is None else float(outcome.value)
    return Ending(hostile.name, task.rule, value, outcome.error)


def _screen(task: Task) -> None:
    """In the service no limit ends it: where one does not end, the test does not either."""
    screen = find_rule(task.rule).screen
    if screen is not None:
        attempt(screen, task.text, task.label, task.context)


def main() -> None:
    endings = asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the largest of the workers; all are reaped
    sys.stdout.buffer.write(msgspec.json.encode(Report(peak, endings)))


if __name__ == "__main__":
    main()
