"""Pairs of answers that are equal, by class (`# name`), and pairs that are not: `|` within a pair, `¦` between two of them."""

from __future__ import annotations

EQUAL = r"""
# integers
\dbinom{n}{2} | \frac{n(n-1)}{2} ¦ 1 234 567 | 1234567
# fractions, mixed
3\frac{x}{2} | \frac{3x}{2} ¦ 0.1\overline{6} | \frac16 ¦ 2\frac{1}{3} | \frac73 ¦ 2 1/3 | 7/3
# decimals
.5\pi | \frac{\pi}{2} ¦ .\overline{3} | \frac13 ¦ 0.333333 | 1/3 ¦ 2.718281828 | e
# radicals
27^{-1/3} | \frac13 ¦ sqrt(2) | \sqrt{2} ¦ \sqrt{10^{100}+1}-10^{50} | \frac{1}{\sqrt{10^{100}+1}+10^{50}}
# sets, lists
x \in \{1,2\} | 1,2 ¦ x = \pm 3 | 3, -3 ¦ \emptyset | \{\}
# tuples
\langle 1,2,3\rangle | (1,2,3) ¦ \begin{pmatrix} 1 \\ 2 \\ 3\end{pmatrix} | \begin{bmatrix}1\\2\\3\end{bmatrix}
(6, 235^\circ) | (6,235) ¦ A(1,2) | (1,2)
# intervals
x \in [1,2] | [1,2] ¦ x \geq 3 | [3,\infty) ¦ \{x \mid 2<x<3\} | (2,3)
# units
5 \mbox{ inches}^2 | 5 ¦ 50\% | 0.5 ¦ 30 degrees | 30 ¦ 90° | 90 ¦ 12 square feet | 12 ¦ 10\text{ miles per hour} | 10
5.4 \text{ cents} | 5.4 ¦ 15000 \text{ kcal m}^{-2} \text{yr}^{-1} | 15000 ¦ €20 | 20
# equations
5 = x | 5 ¦ f(x)=x^2 | x^2 ¦ -2x \ge 4 | x \le -2 ¦ iz + \sqrt2 = 0 | z = i\sqrt{2}
# complex
2\operatorname{cis}60^\circ | 2\operatorname{cis}60^\circ
# trig, logs
\cos\frac{\pi}{3} | 0.5 ¦ \tan^{-1}(1) | \frac\pi4 ¦ \arcsin 1 | \pi/2 ¦ \cos 2x | 1-2\sin^2 x ¦ \sin(30^\circ) | 1/2
\log 100 | 2
# polynomials
2^n\cdot 2 | 2^{n+1} ¦ -(ab+ac+bc) | -ab-ac-bc ¦ \sqrt[4]{x^2y} | x^{1/2}y^{1/4}
\frac{e^{t}}{3}+c e^{-2t} | \frac13 e^t + ce^{-2t} ¦ \lfloor \log_2 n \rfloor + 1 | \lceil \log_2(n+1) \rceil
# bases
52_8 | 52_{8}
# text
\text{Even} | even ¦ \text{(A)} | A ¦ \text{None} | none ¦ \text{Monday} | Monday. ¦ \text{ellipse} | ellipse
# matrices
\begin{pmatrix} 1/2 \\ 0.5 \end{pmatrix} | \begin{pmatrix} \frac12 \\ \frac12 \end{pmatrix}
\frac12\begin{pmatrix}2\\4\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
# ratios, times
2:4 | 1:2
# looks
\(5\) | 5 ¦ \[5\] | 5 ¦ \displaystyle 5 | 5 ¦ \color{blue}{5} | 5 ¦ \textcolor{red}{5} | 5 ¦ 5 \quad | 5
So the answer is $\frac{1}{2}$. | 0.5 ¦ Answer: f(n)=n | $f(n)=n$ ¦ approximately 5 | 5 ¦ \approx 5 | 5 ¦ −5 | -5
x≤5 | x \leq 5 ¦ The answer is 5. | 5
# more
\text{October 30} | October 30 ¦ 7 minutes and 5 seconds | 5 seconds and 7 minutes ¦ \frac{dy}{dx} = 2x | 2x
\sum_{k=1}^{n} k | \frac{n(n+1)}{2} ¦ \sum_{k=1}^{\infty} \frac{1}{2^k} | 1 ¦ \int_0^1 x dx | \frac12 ¦ \sqrt{-4} | 2i
\lim_{x\to 0}\frac{\sin x}{x} | 1 ¦ \frac{n!}{k!(n-k)!} | \binom{n}{k} ¦ {n \choose 2} | \frac{n(n-1)}{2} ¦ \cos\pi/3 | 1/2
100\ \mathrm{km/h} | 100 ¦ \mathrm{~cm} | cm ¦ \text{infinity} | \infty ¦ 5\text{ (in cm)} | 5 ¦ \text{Yes} | yes ¦ No | no
EVEN | even ¦ 3, 4 | (3,4) ¦ \text{Evelyn} | Evelyn ¦ The final answer is $\boxed{5}$ | 5 ¦ $5$ square units | 5 ¦ about 5 | 5
\left(-\infty,-\frac 12\right)\cup\left(-\frac12,\infty\right) | (-\infty,-0.5)\cup(-0.5,\infty) ¦ k\geqslant 2 | k \ge 2
\sqrt[3]{x^2} | x^{2/3} ¦ \sqrt{x}\sqrt{y} | \sqrt{xy} ¦ |x-1|<2 | |1-x|<2 ¦ \arctan\frac12+\arctan\frac13 | \frac\pi4
\cos^2\theta | 1-\sin^2\theta ¦ \cosh^2 x - \sinh^2 x | 1 ¦ AB \parallel CD | AB \parallel CD ¦ \max(3,5) | 5
\gcd(12,18) | 6 ¦ \text{lcm}(4,6) | 12 ¦ \$5\text{ million} | 5000000 ¦ three | \text{three} ¦ 0.5\% | 0.005
(\pm1,2) | (1,2),(-1,2) ¦ 1,2,\ldots,10 | 1,2,\dots,10 ¦ y\in(-\infty,4] | y\le4 ¦ \text{all real numbers} | \mathbb{R}
\varnothing | \text{no solution} ¦ e^{2\ln 3} | 9 ¦ The answer is \text{Evelyn} | Evelyn ¦ \mathbb{R} | (-\infty,\infty)
2\sqrt{3} cm | 2\sqrt3 ¦ \ln|x|+C | C + \ln|x| ¦ $x$ is $5$ | 5 ¦ 2^10 | 1024
# notations
\\dfrac{1}{2} + \frac{1}{72} | \tfrac{1}{2} + \frac1{72} ¦ \\frac{3}{4} | 3/4 ¦ 2\text{i} | 2i
# fonts
\boldsymbol 5 | 5 ¦ \pmb{-\frac{3}{4}} | -0.75 ¦ \bold{7} | 7 ¦ \mathtt{7} | 7 ¦ \mathnormal{7} | 7 ¦ \mathit{x^{2}} | x^2
\mathsf{\sqrt{2}} | \sqrt2 ¦ \bf{5} | 5 ¦ \bm{\mathbf{5}} | 5 ¦ 12{\rm cm}^2 | 12
# not equal to
x!=3 | x≠3 ¦ x \not= 3 | x != 3 ¦ x != 3 | \neq 3 ¦ a != b | b \neq a ¦ 5!=120 | 120
# solutions of several variables
q=2,p=5;q=2,p=7 | (5,2),(7,2) ¦ \begin{cases}x=1\\y=2\end{cases}, \begin{cases}x=3\\y=4\end{cases} | (3,4),(1,2)
(x,y)=(1,2) | y=2,x=1 ¦ x=5, y=6 | 6, 5
# units behind a number
1,\!200m^3 | 1200 ¦ 1,200sq ft | 1200 ¦ 1,200\mathrm{m^{2}} | 1200 ¦ A = 1,200m^2 | 1200
"""

DIFFERENT = r"""
\$\dfrac23 \approx \$0.77 | \$\dfrac23 \approx \$0.67 ¦ 2^{1024}\sqrt2 | 2^{1024}\sqrt2+1 ¦ 0.67 | 2/3 ¦ 3.14 | \pi
2\frac{1}{3} | 2\cdot\frac13 ¦ (1,2) | (1,2,3) ¦ 1<x<2 | [1,2] ¦ x^2-4=0 | 0 ¦ 3+4i | 3-4i ¦ 52_8 | 52_9 ¦ 10:20 | 20:40
\text{(A)} | \text{(B)} ¦ even | odd ¦ \text{dog} | \text{god} ¦ \text{Monday} | \text{Tuesday} ¦ 999999.99 | 1000000
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix} ¦ 2:3 | 3:2 ¦ 1:00 | 2:00 ¦ \sqrt{x^2} | x
(-1)^n | 1 ¦ i^n | 1 ¦ \lfloor n/3 \rfloor | \frac{n}{3} ¦ \sin x | \cos x ¦ \sin^2 x | \sin x^2 ¦ \ln 2 | \log_2 e
5 | \infty ¦ a^{b+c} | a^b+a^c ¦ 0.13 | 25\% ¦ 5 | \text{five} ¦  | 5 ¦ ? | 5 ¦ \ldots | 5 ¦ \frac{1}{0} | 0 ¦ x_1 | x_2
\triangle ABC | \triangle ABD ¦ f(x) | g(x) ¦ \emptyset | 0 ¦ \mathbb{R} | \mathbb{Z} ¦ (-\infty,1)\cup(1,\infty) | \mathbb{R}
October 30 | November 30 ¦ 7 minutes and 5 seconds | 5 ¦ \sum_{k=1}^{n} k | \frac{n(n-1)}{2} ¦ \int_0^1 x dx | 1
\sin x \cdot 2 | \sin 2x ¦ x\ne2 | x\ne3 ¦ \ln|x| | \ln|x|+C ¦ 0.333x | \frac{x}{3} ¦ \max(3,5) | 3 ¦ 100! | 100!+1
AB \parallel CD | AB \perp CD ¦ \text{Yes} | No ¦ \text{no solution} | 0 ¦ x^2-2x+1=0 | (x+1)^2=0 ¦ 1:2 | 2 ¦ x=5 | y=5
5^{1/2} | \frac52 ¦ \sqrt[3]{2} | 3\sqrt2 ¦ x=3 | x=\pm3 ¦ (2,3) | 2 < x < 3 \text{ or } x=5 ¦ 3.1416 | \pi ¦ (C) 7 | D
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1&2&3\end{pmatrix} ¦ \tan\frac\pi2 | 0 ¦ x\in\{1,2\} | (1,2)
2^{2^{100}} | 5 ¦ 2\text{i} | 2 ¦ \begin{cases} x=1 \\ y=2 \end{cases} | x=2, y=1 ¦ RC | rc ¦ AB | ab ¦ Ab | aB
\boldsymbol{1,234} | 1,2,3,4 ¦ \mathbf{x<3} | x>3 ¦ \bm{x<3} | x\le3 ¦ {\bf 5} | b5 ¦ 12\mathrm{m^{2}} | 144
x != 3 | (3,\infty) ¦ \neq 3 | 3 ¦ > 3 | x \ge 3 ¦ 5!=120 | 5 ¦ (5,2),(7,2) | p=5,q=2 ¦ (p,q)=(5,2),(7,2) | (q,p)=(5,2),(7,2)
(p,q)=(5,2),(7,2) | p=2,q=5;p=2,q=7 ¦ p=5,q=2;p=7,q=2 | x=5,y=2;x=7,y=2 ¦ 1,200cm^2 | 200 ¦ 1 200\text{ m}^2 | 200
(1,2),(3,4) | x=1,x=2;y=3,y=4 ¦ x>5 | x\ge 5
"""

# What is read out of a prediction alone: a label that says so means it.
ONE_WAY = r"""
\textbf{(A)}\ 5 | A ¦ \text{(B)} 12 | \text{(B)} ¦ (C) 7 cm | C ¦ D. none of these | D ¦ 10 m | 10 ¦ 6m | 6 ¦ 6m^2 | 6 ¦ 6m² | 6
6m2 | 6 ¦ 5 m^2 | 5 ¦ a+b = 7 | 7 ¦ f(2) + g(3) = 7 | 7 ¦ The largest $n$ is 34. | $34$
"""

# An answer and its label: unions and domains, degrees, ordinals, units, systems, Unicode, looks, remainders, choices.
NOTATIONS = r"""
x\le -1 \lor x \ge 1 | (-\infty,-1]\cup[1,\infty) ¦ x<-1 ∨ x>1 | (-\infty,-1)\cup(1,\infty) ¦ 2 \pmod 5 | 2 \pmod{5}
x = 0 \text{ or } x > 1 | \{0\}\cup(1,\infty) ¦ \{x \in \R \mid x > 2\} | x > 2 ¦ x>2, x\in\mathbb{R} | (2,\infty)
\{x \in \mathbb{R} \colon x \ge 2\} | [2,\infty) ¦ \left\{x \in \mathbb{R} \,\middle|\, x > 2\right\} | (2,\infty) ¦ 30º | 30
30˚ | 30 ¦ 30 deg | 30 ¦ 30^oC | 30 ¦ 30℃ | 30 ¦ \ang{-12.5} | -12.5 ¦ \qty{5}{m} | 5 ¦ \SI{5}{\metre\per\second} | 5
\num{5000} | 5000 ¦ 30\degree | 30 ¦ 30\textdegree | 30 ¦ 21st | 21 ¦ 2nd | 2 ¦ 3rd | 3 ¦ 12\textsuperscript{th} | 12
12^{\textrm{th}} | 12 ¦ 12ᵗʰ | 12 ¦ 5Ω | 5 ¦ 5 μm | 5 ¦ 5 µm | 5 ¦ 5 Å | 5 ¦ 5 × 10⁻³ kg | 0.005 ¦ 5分钟 | 5 ¦ 5个苹果 | 5
5只鸡 | 5 ¦ 5元/千克 | 5 ¦ 5米/秒 | 5 ¦ 5人 | 5 ¦ 5岁 | 5 ¦ 5% | 5 ¦ 5万 | 50000 ¦ 1.2亿 | 120000000
\begin{align}x&=1\\y&=2\end{align} | x=1,y=2 ¦ \begin{gathered}x=1\\y=2\end{gathered} | x=1,y=2 ¦ 5\text{元} | 5
\begin{split}x&=1\\y&=2\end{split} | x=1,y=2 ¦ \left\{ \begin{array}{rcl} x &=& 1 \\ y &=& 2 \end{array} \right. | x=1,y=2
\begin{aligned}x&=1,\\y&=2.\end{aligned} | (1,2) ¦ \begin{dcases}x=1\\y=2\end{dcases} | x=1,y=2
\begin{eqnarray*}x&=&1\\y&=&2\end{eqnarray*} | x=1,y=2 ¦ x⁵ | x^5 ¦ 2ⁿ | 2^n ¦ x₁=2, x₂=3 | 2,3 ¦ a₁₀ | a_{10} ¦ ⅓ | 1/3
３．５ | 3.5 ¦ 25％ | 25 ¦ （1，2） | (1,2) ¦ ∛8 | 2 ¦ \emph{even} | even ¦ \ensuremath{5} | 5 ¦ \framebox{5} | 5
\colorbox{yellow}{5} | 5 ¦ \fcolorbox{red}{white}{5} | 5 ¦ {\large 5} | 5 ¦ \Large{5} | 5 ¦ \huge 5 | 5 ¦ 5 \tag{1} | 5
\underline{\textbf{(B)}} | B ¦ 17 mod 5 | 2 ¦ n \bmod 2 | \frac{1-(-1)^n}{2} ¦ x \equiv 2 \mod 5 | x\equiv 2 \pmod{5}
Option B: 12 | B ¦ option (B) | B ¦ Choice B | B ¦ B、12 | B ¦ B。 | B ¦ B) the red one | B ¦ (D) none of the above | D
(C) not enough information | C ¦ \fbox{5} | 5 ¦ \{x ∈ ℝ|x > 2\} | (2,\infty) ¦ (-∞,-1) or (1,∞) | (-\infty,-1)\cup(1,\infty)
x \in \mathbb{R} \setminus \{0\} | x \ne 0 ¦ \{x\in\mathbb{R}:x^2>4\} | (-\infty,-2)\cup(2,\infty)
\{x \in \mathbb{Z} \mid x > 2\} | \{x \in \mathbb{Z} : x > 2\} ¦ \begin{equation*} x=1 \end{equation*} | 1
\begin{alignedat}{2} x&=1\\ y&=2\end{alignedat} | x=1,y=2 ¦ \begin{aligned} x &= 1 \\ y &= 2 \\ \end{aligned} | (1,2)
√3⁄2 | \frac{\sqrt3}{2} ¦ ½π | \frac{\pi}{2} ¦ 2ˣ | 2^x ¦ aₙ | a_n ¦ 1.6×10⁻¹⁹ C | 1.6\times 10^{-19} ¦ 10⁶ | 1000000
\mathbf{B.}\ 12 | B ¦ B: Paris | B ¦ (B)\;12 | B ¦ 5厘米² | 5 ¦ 5平方米 | 5 ¦ 5個 | 5 ¦ 5円 | 5 ¦ 5公里/小时 | 5 ¦ 5名学生 | 5
5\times10^{3}\,\mathrm{m\,s^{-1}} | 5000 ¦ 5\,\dfrac{\text{m}}{\text{s}} | 5 ¦ 5 kW·h | 5 ¦ 5 mol/L | 5
5\,\mu\mathrm{g/mL} | 5 ¦ 5\,\mu\Omega | 5 ¦ 5\,\hbar | 5\hbar ¦ 5\,\text{ev} | 5 ¦ \angle A = 30^o | 30
13^{\textnormal{th}} | 13 ¦ x \in (-\infty,-1) \text{ or } x \in (1,\infty) | (-\infty,-1)\cup(1,\infty)
x\ne 2 | x<2 \text{ or } x>2
\begin{aligned} &x=1 \\ &y=2 \end{aligned} | x=1,y=2 ¦ \begin{array}{c} x=1 \\ y=2 \end{array} | x=1,y=2
"""

# A rule, a reply that it finds right, and the label.
REPLIES = r"""
math | So $\boxed{4}$ no \fbox{5} | 5 ¦ gsm8k | So \boxed 2.5. Done | 2.5 ¦ acc | So \fbox{5} | 5
math_17k_acc | So \framebox{5} | 5 ¦ gsm8k | #### 1 000 dollars | 1000 ¦ gsm8k | #### 1\,000 | 1000
gsm8k | <answer>about 5</answer> | 5 ¦ gsm8k | The answer is roughly $5 | 5 ¦ gsm8k | The answer is exactly 5. | 5
gsm8k | The answer is nearly 5 | 5 ¦ gsm8k | The answer is approx. 5 | 5 ¦ gsm8k | The answer is ~5 | 5
gsm8k | The answer is \approx 5 | 5 ¦ gsm8k | The answer is therefore 5 | 5 ¦ gsm8k | The answer is simply 5. | 5
gsm8k | Final answer: approximately **5** | 5 ¦ gsm8k | 因此，最终答案是：**5**。 | 5 ¦ gsm8k | 答案等于5 | 5
gsm8k | 答案就是5。 | 5 ¦ gsm8k | 答案应该是5。 | 5 ¦ gsm8k | 答案是大约5个苹果。 | 5 ¦ gsm8k | 正确答案为：5 | 5
gsm8k | 答案是5。谢谢！ | 5 ¦ math | 所以答案是 $\frac{1}{2}$。 | 1/2 ¦ math | 故选B。 | B ¦ math | 所以选择B | B
gsm8k | 答案是5万元。 | 50000 ¦ math | The correct answer is (B) 12. | B ¦ math | \boxed{\text{B. }12} | B
gsm8k | \fbox{\textbf{5}} | 5 ¦ gsm8k | \[\boxed 5\] | 5 ¦ gsm8k | $\boxed 5\%$ | 5 ¦ gsm8k | $\boxed \$5$ | 5
math | $\boxed \pi$ | \pi ¦ math | $\boxed \sqrt{2}$ | \sqrt2 ¦ gsm8k | #### 1 000 kg | 1000
gsm8k | The final answer is about 5 | 5 ¦ gsm8k | The answer would be 5 | 5 ¦ gsm8k | The answer should be 5. | 5
gsm8k | The answer must be 5. | 5 ¦ gsm8k | The answer equals 5 | 5 ¦ gsm8k | The answer is approximately equal to 5 | 5
gsm8k | The answer is close to 5 | 5 ¦ gsm8k | Answer ≈ 5 | 5 ¦ gsm8k | The answer is around 5 hours | 5
gsm8k | The answer is just 5 | 5 ¦ gsm8k | The answer is only 5 | 5 ¦ gsm8k | 【答案】5 | 5 ¦ gsm8k | 最后答案是5 | 5
gsm8k | 答案是５ | 5 ¦ gsm8k | 答案是-5 | -5 ¦ gsm8k | 答案是1,000元。 | 1000 ¦ gsm8k | 答案是 \(5\) 。 | 5
gsm8k | 答案即为5 | 5 ¦ gsm8k | 所以最终的答案是：5。 | 5
"""


def pairs(block: str) -> list[tuple[str, str]]:
    return [tuple(pair.split(" | ", 1)) for line in block.strip("\n").split("\n") for pair in line.split(" ¦ ")]  # type: ignore[misc]


def classes() -> dict[str, list[tuple[str, str]]]:
    """The pairs of `EQUAL` by class."""
    found = [part.split("\n", 1) for part in EQUAL.strip("\n").removeprefix("# ").split("\n# ")]
    return {name: pairs(block) for name, block in found}
