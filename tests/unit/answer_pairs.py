"""Pairs of answers that are equal, by class (`# name`), and pairs that are not: `|` within a pair, `¦` between two of them."""

from __future__ import annotations

EQUAL = r"""
# integers
2^{100} | 1267650600228229401496703205376 ¦ 2^{100}+1 | 1267650600228229401496703205377 ¦ 10! | 3628800
\frac{100!}{98!} | 9900 ¦ \frac{1}{2004!} | \frac{1}{2004!} ¦ \frac{2006!}{2004!} | 2006 \cdot 2005
\frac{2^{2005}+1}{3\cdot 2^{2006}} | \frac13\left(\frac12+2^{-2006}\right) ¦ \binom{10}{3} | 120
\dbinom{n}{2} | \frac{n(n-1)}{2} ¦ 10^{100} | 100^{50} ¦ 1e6 | 1000000 ¦ 1.5 \times 10^{3} | 1500 ¦ 3.2\cdot 10^{-2} | 0.032
-0 | 0 ¦ 007 | 7 ¦ 1,234,567 | 1234567 ¦ 1 234 567 | 1234567 ¦ $1,234.50 | 1234.5 ¦ 12{,}345 | 12345
# fractions, mixed
\frac{6}{8} | \frac34 ¦ -\frac{3}{4} | \frac{-3}{4} ¦ \frac{3}{-4} | -\frac34 ¦ 2\frac{1}{3} | \frac73 ¦ 2 1/3 | 7/3
-2\frac{1}{3} | -\frac73 ¦ 3\frac{x}{2} | \frac{3x}{2} ¦ \dfrac{\dfrac12}{\dfrac34} | \frac23 ¦ 1/2 | 0.5 ¦ \frac 12 | 0.5
\tfrac{5}{2} | 2.5 ¦ 0.1\overline{6} | \frac16 ¦ 0.\overline{142857} | 1/7
# decimals
3.50 | 3.5 ¦ .5 | 0.5 ¦ .5\pi | \frac{\pi}{2} ¦ \boxed{.38} | .38 ¦ .\overline{3} | \frac13 ¦ 0.333333333 | 1/3
0.3333333 | \frac{1}{3} ¦ 0.333333 | 1/3 ¦ 0.666667 | 2/3 ¦ 3.14159265 | \pi ¦ 1.41421356 | \sqrt2 ¦ 2.718281828 | e
31.4159265 | 10\pi ¦ 0.70710678 | \frac{\sqrt2}{2}
# radicals
\sqrt{12} | 2\sqrt3 ¦ \frac{2}{\sqrt3} | \frac{2\sqrt{3}}{3} ¦ \sqrt[3]{16} | 2\sqrt[3]{2} ¦ \sqrt[3]{-8} | -2
\sqrt{3+2\sqrt2} | 1+\sqrt2 ¦ 8^{2/3} | 4 ¦ 27^{-1/3} | \frac13 ¦ \sqrt{2}\sqrt{3} | \sqrt6 ¦ \frac{1}{\sqrt{5}-2} | \sqrt5+2
\sqrt{10^{100}+1}-10^{50} | \frac{1}{\sqrt{10^{100}+1}+10^{50}} ¦ 2\sqrt{3}+\sqrt{3} | 3\sqrt3 ¦ \sqrt {2} | 2^{0.5}
sqrt(2) | \sqrt{2} ¦ \sqrt2/2 | \frac{1}{\sqrt2} ¦ 5\sqrt{13} | \sqrt{325}
# sets, lists
1,2,3 | 3,2,1 ¦ \{1,2,3\} | \{3,1,2\} ¦ 1, 2 | \{2,1\} ¦ 1 and 2 | 1,2 ¦ 1\text{ or }2 | 2, 1 ¦ x=1, x=2 | 1,2
x = 1 \text{ or } x = 2 | x=2 \text{ or } x=1 ¦ x \in \{1,2\} | 1,2 ¦ \{1\} | 1 ¦ \{x=1,x=2\} | \{1,2\}
-1, 0, 1 | \{0, \pm 1\} ¦ \pm\sqrt{2} | \sqrt2, -\sqrt2 ¦ \frac{1\pm\sqrt5}{2} | \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
x = \pm 3 | 3, -3 ¦ 2\pm i | 2+i, 2-i ¦ \emptyset | \varnothing ¦ \emptyset | \{\} ¦ (1,2),(3,4) | (3,4),(1,2)
(1,2) \text{ and } (3,4) | (3,4),(1,2) ¦ \{(1,2),(3,4)\} | (3,4), (1,2)
# tuples
(1,2) | \left(1, 2\right) ¦ (\frac12, 3) | (0.5,3) ¦ (x,y)=(1,2) | (1,2) ¦ \langle 1,2,3\rangle | (1,2,3) ¦ (1;2) | (1,2)
\begin{pmatrix} 1 \\ 2 \\ 3\end{pmatrix} | \begin{bmatrix}1\\2\\3\end{bmatrix} ¦ (3, \frac{\pi}{2}) | (3, \pi/2)
(6, 235^\circ) | (6,235) ¦ A(1,2) | (1,2)
# intervals
[0,\infty) | [0,+\infty) ¦ (-\infty, 3] | (-\infty,3] ¦ x \in [1,2] | [1,2]
(-\infty,1)\cup(1,\infty) | (1,\infty)\cup(-\infty,1) ¦ \mathbb{R}\setminus\{1\} | (-\infty,1)\cup(1,\infty)
(-\infty,\infty) | \mathbb{R} ¦ 1<x<2 | (1,2) ¦ x>3 | (3,\infty) ¦ x \geq 3 | [3,\infty) ¦ [1,2]\cup[2,3] | [1,3]
\{x \mid 2<x<3\} | (2,3) ¦ [ -1, \frac{1}{\sqrt{2}} ) | [-1,\frac{\sqrt2}{2}) ¦ -1 < x \le 2 | 2 \geq x > -1
# units
5\text{ cm} | 5 ¦ 5 cm | 5 ¦ 5\,\mathrm{cm} | 5 ¦ 5\text{ cm}^2 | 5 ¦ 5\text{ cm}^{2} | 5 ¦ 5 \mbox{ inches}^2 | 5 ¦ \$5 | 5
5\% | 5 ¦ 50\% | 0.5 ¦ 30^\circ | 30 ¦ 30^{\circ} | 30 ¦ 30 degrees | 30 ¦ 90° | 90 ¦ 12 square feet | 12
10\text{ miles per hour} | 10 ¦ 10 \text{ m/s} | 10 ¦ 10\ \frac{\text{m}}{\text{s}} | 10 ¦ 5.4 \text{ cents} | 5.4
2 million | 2000000 ¦ 3\pi \text{ cm}^3 | 3\pi ¦ x = 5\text{ cm} | 5 ¦ 45 \text{ degrees} | 45^\circ
15000 \text{ kcal m}^{-2} \text{yr}^{-1} | 15000 ¦ \$3.50 | 3.50 ¦ €20 | 20
# equations
x=5 | 5 ¦ x = 5 | x=5 ¦ 5 = x | 5 ¦ y=2x+1 | 2x+1 ¦ f(x)=x^2 | x^2 ¦ y = 2x + 1 | 2x - y + 1 = 0 ¦ 2x+4y=6 | x+2y=3
x^2+y^2=4 | 4 - y^2 = x^2 ¦ \frac{x^2}{4}+\frac{y^2}{9}=1 | 9x^2+4y^2=36 ¦ x = \frac{1}{2} | 0.5 ¦ x=2+3=5 | 5
y-3=2(x-1) | y=2x+1 ¦ x<5 | 5>x ¦ 2x<10 | x<5 ¦ -2x \ge 4 | x \le -2 ¦ x=1,y=2 | y=2,x=1 ¦ AB = 5 | 5
m\angle A = 30^\circ | 30 ¦ n=1, 2 | 1,2 ¦ iz + \sqrt2 = 0 | z = i\sqrt{2}
# complex
3+4i | 4i+3 ¦ i^2 | -1 ¦ \frac{1}{i} | -i ¦ (1+i)^2 | 2i ¦ e^{i\pi} | -1 ¦ \frac{1+i}{\sqrt{2}} | e^{i\pi/4}
2\operatorname{cis}60^\circ | 2\operatorname{cis}60^\circ ¦ -8 - 8i\sqrt3 | -8-8\sqrt{3}i
# trig, logs
\sin 30^\circ | \frac12 ¦ \sin{30^\circ} | \frac12 ¦ \frac{60^\circ}{2} | 30 ¦ \sin(30^\circ) | 1/2 ¦ \cos\frac{\pi}{3} | 0.5
\tan^{-1}(1) | \frac\pi4 ¦ \arcsin 1 | \pi/2 ¦ \sin^2 x + \cos^2 x | 1 ¦ \cos 2x | 1-2\sin^2 x ¦ \tan x | \frac{\sin x}{\cos x}
\ln 8 | 3\ln 2 ¦ \log_2 16 | 4 ¦ \log_{10} 100 | 2 ¦ \log 100 | 2 ¦ \log_4 8 | 3/2 ¦ \frac{\ln 8}{\ln 2} | 3 ¦ e^{\ln 5} | 5
\sinh x | \frac{e^x-e^{-x}}{2} ¦ 2\cos 15^\circ | \frac{\sqrt6+\sqrt2}{2}
# polynomials
(x+1)^3 | x^3+3x^2+3x+1 ¦ x(x-1)(x+1) | x^3-x ¦ (a+b)(a-b) | a^2-b^2 ¦ \frac{x^2-1}{x-1} | x+1
\frac{1}{x}+\frac{1}{y} | \frac{x+y}{xy} ¦ x^{-1} | \frac1x ¦ 2^n\cdot 2 | 2^{n+1} ¦ n! | n(n-1)!
\frac{n(n+1)}{2} | \frac12 n^2+\frac12 n ¦ (-1)^{n+2} | (-1)^n ¦ 3(x-2)(x+1) | 3x^2-3x-6 ¦ x^2y | y x^2
-(ab+ac+bc) | -ab-ac-bc ¦ \frac{a}{b}\cdot\frac{b}{a} | 1 ¦ x^{1/2} | \sqrt{x} ¦ \sqrt{x^2+y^2} | \sqrt{y^2+x^2}
\sqrt[4]{x^2y} | x^{1/2}y^{1/4} ¦ \frac{e^{t}}{3}+c e^{-2t} | \frac13 e^t + ce^{-2t}
\lfloor \log_2 n \rfloor + 1 | \lceil \log_2(n+1) \rceil ¦ |x-2| | |2-x| ¦ \left|x\right| | \sqrt{x^2}
# bases
1011_2 | 1011_{2} ¦ 52_8 | 52_{8} ¦ \text{A5}_{11} | \text{A5}_{11}
# text
\text{even} | even ¦ \text{Even} | even ¦ \text{(A)} | A ¦ (A) | \text{A} ¦ \textbf{(B)} | B ¦ \mathrm{(C)} | \text{C}
\text{no solution} | No solution ¦ \text{None} | none ¦ \text{A and B} | A, B ¦ A,C,F | \text{A, C, F}
\text{A, C, F} | F, C, A ¦ \text{Monday} | Monday. ¦ \text{ellipse} | ellipse ¦ \textbf{Evelyn} | Evelyn
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} 1/2 \\ 0.5 \end{pmatrix} | \begin{pmatrix} \frac12 \\ \frac12 \end{pmatrix}
2\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\4\end{pmatrix}
\frac12\begin{pmatrix}2\\4\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1&0\\0&1\end{pmatrix}\begin{pmatrix}5\\7\end{pmatrix} | \begin{pmatrix}5\\7\end{pmatrix}
# ratios, times
2:4 | 1:2 ¦ 3 : 5 | 3:5 ¦ 1:2:3 | 2:4:6 ¦ 8:34 \text{ p.m.} | 8\!:\!34 \text{ p.m.} ¦ 12:30 | 12:30
# infinity
\infty | +\infty ¦ -\infty | -\infty
# looks
\boxed{5} | 5 ¦ {5} | 5 ¦ 5. | 5 ¦ \(5\) | 5 ¦ \[5\] | 5 ¦ $$5$$ | 5 ¦ **5** | 5 ¦ \displaystyle 5 | 5 ¦ \color{blue}{5} | 5
\textcolor{red}{5} | 5 ¦ \left.\frac12\right. | 1/2 ¦ 5 \quad | 5 ¦ \mathbf{5} | 5 ¦ The answer is 5. | 5
So the answer is $\frac{1}{2}$. | 0.5 ¦ Answer: 5 | 5 ¦ Answer: f(n)=n | $f(n)=n$ ¦ approximately 5 | 5 ¦ \approx 5 | 5
x^{2} | x^2 ¦ x² | x^2 ¦ 2π | 2\pi ¦ √2 | \sqrt{2} ¦ 3×4 | 12 ¦ ½ | 0.5 ¦ 2*x | 2x ¦ 2**3 | 8 ¦ 3·4 | 12 ¦ −5 | -5
x≤5 | x \leq 5
# more
\text{October 30} | October 30 ¦ October 30 | \text{October 30}
7 minutes and 5 seconds | 7\text{ minutes and }5\text{ seconds} ¦ 7 minutes and 5 seconds | 5 seconds and 7 minutes
f^{-1}(x)=\frac{x-1}{2} | \frac{x-1}{2} ¦ P(x)=x^2+1 | x^2+1 ¦ a_n = 2n+1 | 2n+1 ¦ \frac{dy}{dx} = 2x | 2x
\sum_{k=1}^{n} k | \frac{n(n+1)}{2} ¦ \sum_{k=1}^{10} k^2 | 385 ¦ \sum_{k=1}^{\infty} \frac{1}{2^k} | 1
\int_0^1 x dx | \frac12 ¦ \lim_{x\to 0}\frac{\sin x}{x} | 1 ¦ \frac{n!}{k!(n-k)!} | \binom{n}{k}
{n \choose 2} | \frac{n(n-1)}{2} ¦ \sin x \cdot 2 | 2\sin x ¦ \sin 3\pi/4 | \frac{\sqrt2}{2} ¦ \cos\pi/3 | 1/2
12\,\mathrm{cm^2} | 12 ¦ 100\ \mathrm{km/h} | 100 ¦ \mathrm{~cm} | cm ¦ 10 m/s | 10 ¦ 6\pi\text{ units}^2 | 6\pi
\frac{1}{2}\text{ hour} | 0.5 ¦ 33\frac13\% | \frac{100}{3}\% ¦ \sqrt{-4} | 2i ¦ \frac{-1+i\sqrt3}{2} | e^{2\pi i/3}
\ln|x|+C | C + \ln|x| ¦ (0,1)\cup(1,2) | (0,2)\setminus\{1\} ¦ [1,2]\cup\{3\} | \{3\}\cup[1,2]
x \ne 2 | (-\infty,2)\cup(2,\infty) ¦ x\neq 2 | \mathbb{R}\setminus\{2\} ¦ a<x<b | b>x>a ¦ \text{infinity} | \infty
1e-5 | 10^{-5} ¦ 1e-5 | 0.00001 ¦ 6e13 | 6\times10^{13} ¦ 20^\circ\text{C} | 20 ¦ 20°C | 20 ¦ 5\text{ (in cm)} | 5
\text{Yes} | yes ¦ No | no ¦ EVEN | even ¦ 3, 4 | (3,4) ¦ \text{Evelyn} | Evelyn ¦ The answer is \text{Evelyn} | Evelyn
The final answer is $\boxed{5}$ | 5 ¦ $x$ is $5$ | 5 ¦ $5$ square units | 5 ¦ about 5 | 5 ¦ 2\sqrt{3} cm | 2\sqrt3
x=2, y=3 | (2,3) ¦ \left(-\infty,-\frac 12\right)\cup\left(-\frac12,\infty\right) | (-\infty,-0.5)\cup(-0.5,\infty)
\log_{3}81 | 4 ¦ \log_9 27 | 1.5 ¦ \frac{\log 8}{\log 2} | 3 ¦ \log 8 | 3\log 2 ¦ \ln(x)^2 | (\ln x)^2
-\frac{1}{2}x^2+4x-6=y | y = -\frac12x^2+4x-6 ¦ \{x \mid x > 3\} | (3,\infty) ¦ \{x : x > 3\} | x>3
\frac{1+\sqrt{1+8n}}{2} | d=\frac{1+\sqrt{1+8 n}}{2} ¦ x_1=2,x_2=3 | 2,3 ¦ k\geqslant 2 | k \ge 2 ¦ 2^{k-n} | \frac{2^k}{2^n}
\pi r^2 h | h\pi r^2 ¦ V=\pi r^2h | \pi r^2 h ¦ \frac{4}{3}\pi r^3 | \frac{4\pi r^3}{3} ¦ \sqrt[3]{x^2} | x^{2/3}
\sqrt{x}\sqrt{y} | \sqrt{xy} ¦ x^2-2x+1=0 | (x-1)^2=0 ¦ |x-1|<2 | |1-x|<2 ¦ \frac{1}{2}\ln 2 | \ln\sqrt2
\tan\frac{\pi}{8} | \sqrt2-1 ¦ \arctan\frac12+\arctan\frac13 | \frac\pi4 ¦ \cos^2\theta | 1-\sin^2\theta
4\cos^3\theta-3\cos\theta | \cos3\theta ¦ \cosh^2 x - \sinh^2 x | 1 ¦ \frac{x^3-1}{x-1} | x^2+x+1
\begin{pmatrix}1\\2\end{pmatrix}+t\begin{pmatrix}3\\4\end{pmatrix} | \begin{pmatrix}1+3t\\2+4t\end{pmatrix}
(1+t, 2-t) | (t+1,-t+2) ¦ \left\lfloor \frac{n}{2}\right\rfloor | \left\lfloor n/2\right\rfloor ¦ n^2-n+41 | 41+n(n-1)
\overline{AB} | \overline{AB} ¦ AB \parallel CD | AB \parallel CD ¦ \max(3,5) | 5 ¦ \gcd(12,18) | 6 ¦ \text{lcm}(4,6) | 12
\operatorname{lcm}(4,6) | 12 ¦ 5\times 10^{-3} | 0.005 ¦ 10^{-3} | 0.001 ¦ 1.23\times10^{5} | 123000 ¦ \$1{,}000.50 | 1000.5
\$5\text{ million} | 5000000 ¦ 5 \text{ million} | 5{,}000{,}000 ¦ three | \text{three} ¦ 12\% | 12 ¦ \frac{12}{100} | 12\%
0.5\% | 0.005 ¦ 1:2 | \frac12 ¦ \pm\frac{1}{2} | \frac12,-\frac12 ¦ (\pm1,2) | (1,2),(-1,2) ¦ x=\pm\sqrt3 | \pm\sqrt{3}
1,2,\ldots,10 | 1,2,\dots,10 ¦ -3\le x\le 3 | [-3,3] ¦ y\in(-\infty,4] | y\le4 ¦ \mathbb{R} | (-\infty,\infty)
\text{all real numbers} | \mathbb{R} ¦ \varnothing | \text{no solution} ¦ 2^{10} | 1024 ¦ 2^10 | 1024 ¦ x^10 | x^{10}
\sqrt{50}-\sqrt{8} | 3\sqrt2 ¦ \sqrt 2 + \sqrt 3 | \sqrt{5+2\sqrt6} ¦ \frac{3}{\sqrt[3]{9}} | \sqrt[3]{3} ¦ e^{2\ln 3} | 9
0.1 + 0.2 | 0.3 ¦ 1.0 | 1 ¦ 100.00 | 100 ¦ -0.5 | -\frac{1}{2} ¦ 0.5x+1 | \frac{x}{2}+1 ¦ 1.5x | \frac{3x}{2}
# notations
\\dfrac{1}{2} + \frac{1}{72} | \tfrac{1}{2} + \frac1{72} ¦ \\frac{3}{4} | 3/4 ¦ ]0,1[ | (0,1) ¦ [0,1[ | [0,1)
]-\infty, 3] | (-\infty,3] ¦ 5\frac{\text{m}}{\text{s}^2} | 5 ¦ 5 \mathrm{~m} | 5 ¦ 5\,\mathrm{m} | 5 ¦ 5 \mathrm{~N} | 5
3+4\mathrm{i} | 3+4i ¦ \mathrm{e}^{2} | e^2 ¦ \text{e} | e ¦ 2\text{i} | 2i ¦ \begin{cases} x=1 \\ y=2 \end{cases} | x=1, y=2
(a,b,c)=(1,2,3) | a=1,b=2,c=3 ¦ a=1,b=2,c=3 | (1,2,3) ¦ 6m | 6 m ¦ 1\text{, }2 | 2,1 ¦ \frac{1}{2},\ \frac{3}{2} | 3/2, 1/2
2\mathbf{v} | 2v ¦ \mathbf{v}\cdot\mathbf{w} | \mathbf{w}\cdot\mathbf{v} ¦ \boxed{\text{None}} | none ¦ 1 + 2 + 3 | 6
# fonts
\boldsymbol{5} | 5 ¦ \boldsymbol{-3} | -3 ¦ \boldsymbol{1,234} | 1234 ¦ x = \boldsymbol{1,234} | 1234
\boldsymbol{\frac{1}{2}} | 1/2 ¦ \boldsymbol{\frac{\boldsymbol{1}}{2}} | 1/2 ¦ \boldsymbol{(1,2)} | (1,2)
\boldsymbol{\{1,2\}} | 2,1 ¦ \boldsymbol{x=5} | 5 ¦ \boldsymbol{5\text{ cm}} | 5 ¦ \boldsymbol{\text{even}} | even
\boldsymbol{2^{10}} | 1024 ¦ 2^{\boldsymbol{10}} | 1024 ¦ 2^\boldsymbol{10} | 1024 ¦ \boldsymbol{2}^{10} | 1024
\boldsymbol{(x+1)}^2 | x^2+2x+1 ¦ \frac{\boldsymbol{12}}{5} | 2.4 ¦ \frac\boldsymbol{12}\boldsymbol{5} | 2.4
\sqrt{\boldsymbol{2}} | \sqrt2 ¦ \boldsymbol{\pi} | \pi ¦ \boldsymbol 5 | 5 ¦ \bm5 | 5 ¦ \bm{7} | 7 ¦ \bm{[1,2)} | [1,2)
\bm{x<3} | x<3 ¦ \pmb{-\frac{3}{4}} | -0.75 ¦ \bold{7} | 7 ¦ \mathtt{7} | 7 ¦ \mathnormal{7} | 7 ¦ \mathbf{\frac{1}{2}} | 0.5
\mathbf{[1,2)} | [1,2) ¦ \mathbf{5!} | 120 ¦ \mathit{x^{2}} | x^2 ¦ \mathsf{\sqrt{2}} | \sqrt2 ¦ {\bf 5} | 5
{\bf -\frac{1}{2}} | -0.5 ¦ \bf{5} | 5 ¦ \bm{\mathbf{5}} | 5 ¦ \mathbf{even} | even ¦ 12\mathrm{cm^{2}} | 12
12\mathrm{m^{2}} | 12 ¦ 12{\rm cm}^2 | 12
# not equal to
x != 3 | x \neq 3 ¦ x!=3 | x \ne 3 ¦ x!=3 | x≠3 ¦ x != 3 | (-\infty,3)\cup(3,\infty) ¦ x!=3 | \mathbb{R}\setminus\{3\}
x \not= 3 | x != 3 ¦ x =/= 3 | x \neq 3 ¦ x /= 3 | x \neq 3 ¦ x <> 3 | x \neq 3 ¦ x != -3, x != 2 | x\ne 2, x\ne -3
x != 2 \text{ and } x != -3 | x\ne -3 \text{ and } x\ne 2 ¦ x_1 != 3 | x_1 \neq 3 ¦ x_{1}!=3 | x_1 \neq 3
f(x) != 0 | f(x) \neq 0 ¦ a != b | b \neq a ¦ |x|!=2 | |x| \ne 2 ¦ 2x != 6 | x \ne 3 ¦ != 3 | \neq 3 ¦ \neq 3 | x \neq 3
x != 3 | \neq 3 ¦ > 3 | x > 3 ¦ \le 4 | x \le 4 ¦ 5!=120 | 120 ¦ n! = n(n-1)! | n!=n(n-1)! ¦ (n-1)!=6 | (n-1)! = 6
# solutions of several variables
(5,2),(7,2) | p=5,q=2;p=7,q=2 ¦ (7,2),(5,2) | p=5,q=2;p=7,q=2 ¦ p=7,q=2;p=5,q=2 | (5,2),(7,2)
(5,2),(7,2) | p=5, q=2 \text{ or } p=7, q=2 ¦ \{(5,2),(7,2)\} | p=5,q=2 or p=7,q=2 ¦ (5,2) \text{ and } (7,2) | p=5,q=2,p=7,q=2
(p,q)=(5,2),(7,2) | p=5,q=2;p=7,q=2 ¦ (p,q)=(7,2),(5,2) | p=5,q=2;p=7,q=2 ¦ (p,q)=(7,2),(p,q)=(5,2) | q=2,p=5;q=2,p=7
(p,q)=(5,2) \text{ or } (7,2) | (7,2),(5,2) ¦ (p,q)\in\{(5,2),(7,2)\} | p=7,q=2;p=5,q=2 ¦ p=5,q=2;q=2,p=7 | (5,2),(7,2)
q=2,p=5;q=2,p=7 | (5,2),(7,2) ¦ q=2,p=5 | (5,2) ¦ (p=5,q=2),(p=7,q=2) | (7,2),(5,2) ¦ \{p=5,q=2\},\{p=7,q=2\} | (5,2),(7,2)
\begin{cases}x=1\\y=2\end{cases}, \begin{cases}x=3\\y=4\end{cases} | (3,4),(1,2) ¦ (1,2,3),(4,5,6) | x=4,y=5,z=6;x=1,y=2,z=3
(1,2),(3,4) | x_1=1,x_2=2;x_1=3,x_2=4 ¦ (\frac12,0.5),(3,-1) | x=3,y=-1;x=\frac{1}{2},y=\frac12 ¦ (x,y)=(1,2) | (y,x)=(2,1)
(x,y)=(1,2) | y=2,x=1 ¦ (0,\sqrt{3}),(0,-\sqrt{3}) | x=0,y=\sqrt3;x=0,y=-\sqrt3 ¦ AB=9, CD=4 | 4, 9 ¦ x=5, y=6 | 6, 5
# units behind a number
1,200cm^2 | 1200 ¦ 1,200cm^2 | 1,200 ¦ 1,200cm^{2} | 1200\text{ cm}^2 ¦ 1,200m^2 | 1200 ¦ 1,200m^{2} | 1200 ¦ 1,200m² | 1,200
1,234,567m^2 | 1234567 ¦ 1{,}200m^2 | 1200 ¦ 1,\!200m^3 | 1200 ¦ 12,345\text{m}^2 | 12345 ¦ 12,345\text{m}^2 | 12,345m^2
1,200.5km^2 | 1200.5 ¦ 1,200 cm2 | 1200 ¦ 1,200cm2 | 1200 ¦ 1,200sq cm | 1200 ¦ 1,200sq. cm | 1200 ¦ 1,200sq ft | 1200
1,200\text{ cm} ^ 2 | 1200 ¦ 1,200\,\text{m}^{2} | 1200 ¦ 1,200\mathrm{m^{2}} | 1200 ¦ 1 200\text{ m}^2 | 1200
A = 1,200m^2 | 1200 ¦ 1,200\operatorname{cm}^2 | 1200 ¦ 1,200 square units | 1200
"""

DIFFERENT = r"""
10 - 3 = 6 | 7 ¦ 7 = 8 | 7 ¦ 2 + 2 = 5 = 4 | 5
0.56 = 57\% | 0.56 = 56\% ¦ \$\dfrac23 \approx \$0.77 | \$\dfrac23 \approx \$0.67 ¦ 2^{100} | 2^{100}+1
\frac{1}{2004!} | \frac{1}{2006!} ¦ 2^{2^{100}} | 2^{2^{100}}+1 ¦ 2^{2^{100}} | 2^{2^{101}} ¦ 3^{1000000} | 3^{1000000}+2
100! | 100!+1 ¦ 10^{50} | 10^{51} ¦ \frac{10^{50}}{3} | \frac{10^{50}+1}{3} ¦ \sqrt{10^{100}+1} | 10^{50}
2^{1024}\sqrt2 | 2^{1024}\sqrt2+1 ¦ \sqrt{2}+10^{-60} | \sqrt2 ¦ 123456789012345678 | 123456789012345679 ¦ 0.333 | 1/3
0.33333 | 1/3 ¦ 0.67 | 2/3 ¦ 3.1416 | \pi ¦ 3.14 | \pi ¦ 3.50 | 3.05 ¦ 1.5 | 1.50001 ¦ 28121600.01 | 28121600
999999.99 | 1000000 ¦ 100.01 | 100 ¦ \frac34 | \frac43 ¦ 2\frac13 | \frac23 ¦ 2\frac{1}{3} | 2\cdot\frac13 ¦ (1,2) | (2,1)
(1,2) | [1,2] ¦ (1,2] | [1,2) ¦ [1,2] | (1,2) ¦ \{1,2\} | (1,2) ¦ \{1,2\} | \{1,2,3\} ¦ 1,2 | 1,2,3 ¦ 1,2 | 1 ¦ (1,2) | (1,2,3)
3 | \pm 3 ¦ \pm 3 | -3 ¦ 1\pm\sqrt2 | 1+\sqrt2 ¦ x=5 | x=6 ¦ x=5 | y=5 ¦ y=2x+1 | y=2x+2 ¦ x^2+y^2=4 | x^2+y^2=16 ¦ x>5 | x<5
x>5 | x\ge 5 ¦ x<5 | 5 ¦ x \ge 5 | 5 ¦ 1<x<2 | [1,2] ¦ x^2-4=0 | 0 ¦ 2x+4y-3=0 | 0 ¦ 3+4i | 3-4i ¦ 3i | 3 ¦ i | 1
1011_2 | 1011_3 ¦ 204_8 | 204_5 ¦ 52_8 | 52_9 ¦ \text{A} | \text{B} ¦ \text{(A)} | \text{(B)} ¦ even | odd
\text{dog} | \text{god} ¦ \text{Monday} | \text{Tuesday} ¦ A,B | A,C ¦ \text{A, B} | \text{A}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix} ¦ 2:3 | 3:2 ¦ 1:00 | 12:00 ¦ 1:00 | 2:00
10:20 | 20:40 ¦ (x+1)^2 | x^2+1 ¦ x^2 | 2x ¦ x | y ¦ x^{12} | x^2 ¦ 2x | 2 ¦ \sqrt{x^2} | x ¦ n! | (n+1)! ¦ (-1)^n | 1
(-1)^n | -1 ¦ (-1)^{n+m} | (-1)^n ¦ (-1)^{n+m} | 1 ¦ i^n | 1 ¦ \lfloor n/3 \rfloor | \frac{n}{3} ¦ \sin x | \cos x
\sin 2x | 2\sin x ¦ \sin^2 x | \sin x^2 ¦ \log_2 8 | \log_3 8 ¦ \ln 2 | \log_2 e ¦ |x| | x ¦ \infty | -\infty ¦ \infty | 10
5 | \infty ¦ \frac{1}{x+y} | \frac1x+\frac1y ¦ a^{b+c} | a^b+a^c ¦ 2^{3^2} | (2^3)^2 ¦ 25\% | 13 ¦ 0.13 | 25\% ¦ 5 | \text{five}
 | 5 ¦ ? | 5 ¦ \ldots | 5 ¦ 5 |  ¦ \frac{1}{0} | 0 ¦ \frac{1}{0} | 5 ¦ 1 2 3 4 5 | 5 ¦ x_1 | x_2 ¦ a_{37} = 19 | a_{38}=19
\triangle ABC | \triangle ABD ¦ f(x) | g(x) ¦ f(x) | f(y) ¦ f(2) | f(3) ¦ f(x)=1 | f(x)=2 ¦ f(x) = x+1 | f(x)=2x+2
f(2)=3 | f(2)=4 ¦ 2f(x) | f(x) ¦ \lfloor\frac{2n-1}{5}\rfloor | \lfloor\frac{2n-2}{5}\rfloor ¦ \emptyset | 0 ¦ \{0\} | \emptyset
\mathbb{R} | \mathbb{Z} ¦ (-\infty,1)\cup(1,\infty) | \mathbb{R} ¦ (1,2)\cup(3,4) | (1,2)\cup(3,5) ¦ -3 | 3
- \frac{1}{2} | \frac12 ¦ 7x+3 | 3x+7 ¦ e^{x} | e^{-x} ¦ 12 | 1,2 ¦ 1,2 | 12 ¦ 3.5 | 3,5 ¦ October 30 | November 30
7 minutes and 5 seconds | 5 ¦ f(x)=2x | f(x)=x^2 ¦ \sum_{k=1}^{n} k | \frac{n(n-1)}{2} ¦ \int_0^1 x dx | 1
\sin x \cdot 2 | \sin 2x ¦ (0,1)\cup(1,2) | (0,2) ¦ x\ne2 | x\ne3 ¦ a<x<b | a<x\le b ¦ \ln|x| | \ln|x|+C ¦ 3, 4 | (4,3)
\log 8 | 8\log 2 ¦ 0.333x | \frac{x}{3} ¦ 1.5x | 1.6x ¦ \max(3,5) | 3 ¦ 12\% | 13\% ¦ \frac{1}{x} | x ¦ x^10 | x^{100}
\frac{a}{b} | \frac{b}{a} ¦ a-b | b-a ¦ |x-1|<2 | |x-1|\le2 ¦ (\pm1,2) | (1,2) ¦ 1,1,2 | 1,2 ¦ 1,1,2 | 1,2,2
(1,2),(3,4) | (1,3),(2,4) ¦ \{1,2\} | [1,2] ¦ [1,2]\cup\{3\} | [1,3] ¦ AB \parallel CD | AB \perp CD ¦ \text{Yes} | No
\text{no solution} | 0 ¦ (1+t,2-t) | (1-t,2+t) ¦ x^2-2x+1=0 | (x+1)^2=0 ¦ 2,3 | 2.3 ¦ \frac{1}{3} | 0.3 ¦ 10^{-3} | 10^{3}
1:2 | 2 ¦ 5^{1/2} | \frac52 ¦ \sqrt[3]{2} | 3\sqrt2 ¦ 2\sqrt{3} | \sqrt{23} ¦ x=3 | x=\pm3 ¦ (2,3) | 2 < x < 3 \text{ or } x=5
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1&2&3\end{pmatrix} ¦ \tan\frac\pi2 | 0 ¦ x\in\{1,2\} | (1,2) ¦ 2^{2^{100}} | 5
10^{1000} | 10^{1000}+1 ¦ 10^{-1000} | 0 ¦ 10^{-1000} | 10^{-1001} ¦ 0.0 | 0.1 ¦ \text{(B)} 12 | \text{(A)} ¦ ]0,1[ | [0,1]
2\text{i} | 2 ¦ a=1,b=2 | (2,1) ¦ (C) 7 | D ¦ \begin{cases} x=1 \\ y=2 \end{cases} | x=2, y=1 ¦ ABC | A ¦ RC | rc ¦ AB | ab
Ab | aB ¦ \boldsymbol{5} | 6 ¦ \boldsymbol{1,234} | 1,2,3,4 ¦ \boldsymbol{12} | 1,2 ¦ \boldsymbol{-3} | 3
\boldsymbol{\frac{1}{2}} | 2 ¦ \boldsymbol{[1,2)} | [1,2] ¦ \boldsymbol{x+1}^2 | x+1 ¦ \boldsymbol{v} | \boldsymbol{w}
\mathbf{5!} | 5 ¦ \mathbf{[1,2)} | (1,2) ¦ \mathbf{x<3} | x>3 ¦ \bm{x<3} | x\le3 ¦ {\bf 5} | b5 ¦ 12\mathrm{m^{2}} | 144
x != 3 | x = 3 ¦ x != 3 | 3 ¦ x!=3 | 3 ¦ x!=3 | x=3 ¦ x != 3 | x \neq 4 ¦ x != 3 | x > 3 ¦ x != 3 | (3,\infty) ¦ \neq 3 | 3
\neq 3 | x = 3 ¦ \neq 3 | x \neq 4 ¦ > 3 | x < 3 ¦ > 3 | x \ge 3 ¦ > 3 | 3 ¦ x != 3, x != 4 | x \neq 3 ¦ 5!=120 | 5
(5,2) | (2,5) ¦ (5,2),(7,2) | p=5,q=2;p=7,q=3 ¦ (5,2),(7,3) | p=5,q=3;p=7,q=2 ¦ p=5,q=2;p=7,q=3 | p=5,q=3;p=7,q=2
(5,2),(7,2) | p=5,q=2 ¦ (5,2) | p=5,q=2;p=7,q=2 ¦ (5,2),(7,2) | p=2,q=5;p=2,q=7 ¦ (p,q)=(5,2),(7,2) | (q,p)=(5,2),(7,2)
(p,q)=(5,2),(7,2) | p=2,q=5;p=2,q=7 ¦ p=5,q=2;p=7,q=2 | x=5,y=2;x=7,y=2 ¦ p=5,q=2;p=7,q=2 | (5,2,7,2)
[5,2],[7,2] | p=5,q=2;p=7,q=2 ¦ (1,2),(3,4) | x=1,x=2;y=3,y=4 ¦ (1,2),(3,4) | x=1,y=4;x=3,y=2 ¦ (5,2),(5,2) | p=5,q=2;p=7,q=2
(x,y)=(1,2) | (y,x)=(1,2) ¦ 1,200cm^2 | 1201 ¦ 1,200cm^2 | 1,2 ¦ 1,200cm^2 | 200 ¦ 1,200m^2 | 1440000 ¦ 9 x^2 | 9 ¦ 9x^2 | 9
3x2 | 3 ¦ 1,200x^2 | 1200 ¦ 1 200\text{ m}^2 | 200
"""

# What is read out of a prediction alone: a label that says so means it.
ONE_WAY = r"""
\textbf{(A)}\ 5 | A ¦ \text{(B)} 12 | \text{(B)} ¦ (C) 7 cm | C ¦ D. none of these | D ¦ 10 m | 10 ¦ 6m | 6 ¦ 6m^2 | 6 ¦ 6m² | 6
6m2 | 6 ¦ 5 m^2 | 5 ¦ a+b = 7 | 7 ¦ f(2) + g(3) = 7 | 7 ¦ The largest $n$ is 34. | $34$
"""

# An answer and its label: unions and domains, degrees, ordinals, units, systems, Unicode, looks, remainders, choices.
NOTATIONS = r"""
x\le -1 \text{ or } x\ge 1 | (-\infty,-1]\cup[1,\infty) ¦ x<-1 or x>1 | (-\infty,-1)\cup(1,\infty)
x<-1 or 2<x\le 3 | (-\infty,-1)\cup(2,3] ¦ x \in (-\infty,-1) \text{ or } x \in (1,\infty) | (-\infty,-1)\cup(1,\infty)
x\le -1 \lor x \ge 1 | (-\infty,-1]\cup[1,\infty) ¦ x<-1 ∨ x>1 | (-\infty,-1)\cup(1,\infty)
1<x or x<-1 | (-\infty,-1)\cup(1,\infty) ¦ (1,\infty) or (-\infty,-1) | (-\infty,-1)\cup(1,\infty)
x = 0 \text{ or } x > 1 | \{0\}\cup(1,\infty) ¦ x > 1 \text{ or } x = 0 | x=0 or x>1 ¦ x\ne 2 | x<2 \text{ or } x>2
x \in (-\infty,-1)\cup(1,\infty) | x<-1 \text{ or } x>1 ¦ \{x \mid x<-1 \text{ or } x>1\} | (-\infty,-1)\cup(1,\infty)
\{x : x \in \mathbb{R}, x > 2\} | (2,\infty) ¦ \{x \in \mathbb{R} : x > 2\} | (2,\infty) ¦ \{x \in \R \mid x > 2\} | x > 2
\{x \in \mathbb{R} \mid 1 < x \le 2\} | (1,2] ¦ \{x \in \mathbb{R} \mid x \ne 2\} | (-\infty,2)\cup(2,\infty)
\{x\mid x>2, x\in\mathbb{R}\} | (2,\infty) ¦ x>2, x\in\mathbb{R} | (2,\infty)
\{x \in \mathbb{R} \colon x \ge 2\} | [2,\infty) ¦ \left\{x \in \mathbb{R} \,\middle|\, x > 2\right\} | (2,\infty)
\{y \in \mathbb{R} \mid y > 2\} | (2,\infty) ¦ x<-\sqrt2 \text{ or } x>\sqrt2 | (-\infty,-\sqrt{2})\cup(\sqrt{2},\infty)
x<-1,\text{ or } x>1 | (-\infty,-1)\cup(1,\infty) ¦ x<-1\text{, or }x>1 | (-\infty,-1)\cup(1,\infty)
]-\infty,-1[\,\cup\,]1,\infty[ | (-\infty,-1)\cup(1,\infty) ¦ 30^o | 30^\circ ¦ 30^{o} | 30 ¦ 30^\text{o} | 30
30^{\mathrm{o}} | 30 ¦ 30^{\textrm{o}} | 30 ¦ 30º | 30 ¦ 30˚ | 30 ¦ 30\,^{\circ} | 30 ¦ 30{}^\circ | 30 ¦ 30^{\,\circ} | 30
30 deg | 30 ¦ 30\,\mathrm{deg} | 30 ¦ 30^oC | 30 ¦ 30^{\circ}\mathrm{C} | 30 ¦ 30℃ | 30 ¦ \ang{30} | 30^\circ
\ang{-12.5} | -12.5 ¦ \SI{30}{\degree} | 30 ¦ \qty{5}{m} | 5 ¦ \SI{5}{\metre\per\second} | 5 ¦ \num{5000} | 5000
\sin(30^o) | \frac12 ¦ \cos 60^{\text{o}} | 1/2 ¦ \tan(\ang{45}) | 1 ¦ 30\degree | 30 ¦ 30\textdegree | 30
\frac{90^o}{2} | 45 ¦ 12th | 12 ¦ 21st | 21 ¦ 2nd | 2 ¦ 3rd | 3 ¦ 12^{th} | 12 ¦ 12^{\mathrm{th}} | 12
12\textsuperscript{th} | 12 ¦ 12^\text{th} | 12 ¦ 12^{\textrm{th}} | 12 ¦ 12\mathrm{th} | 12 ¦ 12ᵗʰ | 12
$12^{\text{th}}$ | 12 ¦ 1^{\text{st}} | 1 ¦ 22^{\text{nd}} | 22 ¦ n^{\text{th}} | n^{\text{th}} ¦ 5Ω | 5 ¦ 5\text{ }\Omega | 5
5\,\text{k}\Omega | 5 ¦ 5\,k\Omega | 5 ¦ 5 kΩ | 5 ¦ 5\,\Omega\cdot\text{m} | 5 ¦ 5 μm | 5 ¦ 5 µm | 5 ¦ 5\,\mu m | 5
5\,\mathrm{\mu m} | 5 ¦ 5\,\mu\mathrm{m} | 5 ¦ 5\,\mu\text{F} | 5 ¦ 5\,\text{μm} | 5 ¦ 5\,\text{Å} | 5 ¦ 5 Å | 5
2\sqrt{3}\,\Omega | 2\sqrt3 ¦ 2\pi\,\mu\text{s} | 2\pi ¦ 5\,\mathrm{kg\cdot m/s^2} | 5 ¦ 5\,\mathrm{kg\,m^2} | 5
5\,\mathrm{kg\,m^{2}\,s^{-2}} | 5 ¦ 5\,\mathrm{J\,mol^{-1}\,K^{-1}} | 5 ¦ 5\,\text{J}\cdot\text{s} | 5
5\ \text{kg}\cdot\text{m}^2 | 5 ¦ 5\ \text{kg}\,\text{m}\,\text{s}^{-2} | 5 ¦ 5\,\mathrm{m}/\mathrm{s}^{2} | 5 ¦ 5 m/s^2 | 5
5 kg m/s^2 | 5 ¦ 5 kg·m/s² | 5 ¦ 5 m s^{-1} | 5 ¦ 5 m·s⁻² | 5 ¦ 5 N·m | 5 ¦ 5\text{ N}\cdot\text{m} | 5
5\,\frac{\mathrm{kg}}{\mathrm{m}^3} | 5 ¦ 5\,\mathrm{s^{-1}} | 5 ¦ 5 \mathrm{cm}^{3} | 5 ¦ 5\,\text{m}^{-1} | 5
5 × 10⁻³ kg | 0.005 ¦ 6.02×10²³ | 6.02\times 10^{23} ¦ 5个 | 5 ¦ 5 个 | 5 ¦ 5米 | 5 ¦ 5厘米 | 5 ¦ 5平方厘米 | 5 ¦ 5 千克 | 5
5小时 | 5 ¦ 5分钟 | 5 ¦ 5个苹果 | 5 ¦ 5只鸡 | 5 ¦ 5元/千克 | 5 ¦ 5米/秒 | 5 ¦ 5人 | 5 ¦ 5岁 | 5 ¦ 5% | 5 ¦ 5万 | 50000
5万元 | 50000 ¦ 1.2亿 | 120000000 ¦ 2\sqrt{3}厘米 | 2\sqrt3 ¦ \frac{1}{2}米 | 0.5 ¦ 5\text{元} | 5 ¦ 5\text{ 厘米} | 5
x=5厘米 | 5 ¦ \begin{align}x&=1\\y&=2\end{align} | x=1,y=2 ¦ \begin{gathered}x=1\\y=2\end{gathered} | x=1,y=2
\begin{split}x&=1\\y&=2\end{split} | x=1,y=2 ¦ \begin{cases}x&=1\\y&=2\end{cases} | x=1,y=2
\begin{cases}x=1,\\y=2\end{cases} | x=1,y=2 ¦ \left\{\begin{array}{l}x=1\\y=2\end{array}\right. | x=1,y=2
\left\{ \begin{array}{rcl} x &=& 1 \\ y &=& 2 \end{array} \right. | x=1,y=2
\left\{\begin{aligned}x&=1\\y&=2\end{aligned}\right. | x=1,y=2 ¦ \begin{aligned}x&=1,\\y&=2.\end{aligned} | (1,2)
\begin{aligned}x&=2+3\\&=5\end{aligned} | 5 ¦ \begin{aligned}x+y&=3\\x-y&=1\end{aligned} | x+y=3, x-y=1
\begin{dcases}x=1\\y=2\end{dcases} | x=1,y=2 ¦ \begin{eqnarray*}x&=&1\\y&=&2\end{eqnarray*} | x=1,y=2
\begin{aligned}x&>1\\y&<2\end{aligned} | x>1,y<2 ¦ 3×10⁻² | 0.03 ¦ x⁵ | x^5 ¦ x¹² | x^{12} ¦ 2ⁿ | 2^n ¦ 10²³ | 10^{23}
x₁=2, x₂=3 | 2,3 ¦ a₁₀ | a_{10} ¦ ⅓ | 1/3 ¦ 3⁄4 | 3/4 ¦ ５ | 5 ¦ ３．５ | 3.5 ¦ 25％ | 25 ¦ （1，2） | (1,2) ¦ ∛8 | 2
\underline{\frac{1}{2}} | 0.5 ¦ \underline{\text{even}} | even ¦ \underline{\underline{5}} | 5 ¦ \emph{even} | even
\ensuremath{5} | 5 ¦ \framebox{5} | 5 ¦ \colorbox{yellow}{5} | 5 ¦ \fcolorbox{red}{white}{5} | 5 ¦ {\large 5} | 5
\Large{5} | 5 ¦ \huge 5 | 5 ¦ 5 \tag{1} | 5 ¦ \underline{B} | B ¦ \underline{\textbf{(B)}} | B ¦ 17 \mod 5 | 2 ¦ 17 mod 5 | 2
17\text{ mod }5 | 2 ¦ 2^{10} \bmod 7 | 2 ¦ -17 \bmod 5 | 3 ¦ 2 | 17 \bmod 5 ¦ n \bmod 2 | \frac{1-(-1)^n}{2}
x \equiv 2 \pmod 5 | x\equiv 2 \pmod{5} ¦ x \equiv 2 \pmod{5} | x \equiv 2 \bmod 5 ¦ x \equiv 2 \mod 5 | x\equiv 2 \pmod{5}
(B) 12 | B ¦ B. 12 cm | B ¦ B.12 | B ¦ B: \frac12 | B ¦ \textbf{B.} 12 | B ¦ \text{B. } 12 | B ¦ \text{B) }12 | B
**B.** 12 | B ¦ [B] 12 | B ¦ Option B | B ¦ Option B: 12 | B ¦ option (B) | B ¦ Choice B | B ¦ B．12 | B ¦ B、12 | B ¦ B。 | B
b) 12 | B ¦ B) the red one | B ¦ (D) none of the above | D ¦ (C) not enough information | C ¦ B. 3 and 4 | B
B. 3 or 4 | B ¦ \fbox{5} | 5 ¦ \{x ∈ ℝ|x > 2\} | (2,\infty) ¦ x < -1 \;\text{or}\; x > 1 | (-\infty,-1)\cup(1,\infty)
x<-1\quad\text{or}\quad x>1 | (-\infty,-1)\cup(1,\infty) ¦ x<-1 \mbox{ or } x>1 | (-\infty,-1)\cup(1,\infty)
(-∞,-1) or (1,∞) | (-\infty,-1)\cup(1,\infty) ¦ \{x\mid x>2,\ x\in\mathbb R\} | (2,\infty)
x \in \mathbb{R} \setminus \{0\} | x \ne 0 ¦ x\neq 0, x\in\mathbb{R} | (-\infty,0)\cup(0,\infty)
\{x|x<-1\} \cup \{x|x>1\} | (-\infty,-1)\cup(1,\infty) ¦ \{x\in\mathbb{R}:x^2>4\} | (-\infty,-2)\cup(2,\infty)
\{x \in \mathbb{Z} \mid x > 2\} | \{x \in \mathbb{Z} : x > 2\}
x<0 \text{ or } 0<x<1 \text{ or } x>2 | (-\infty,0)\cup(0,1)\cup(2,\infty)
x \le \frac{1}{2} \text{ or } x \ge 3 | \left(-\infty,\frac12\right]\cup[3,\infty)
k < -2 \text{ or } k > 2 | (-\infty,-2) \cup (2,\infty) ¦ \begin{aligned} &x=1 \\ &y=2 \end{aligned} | x=1,y=2
\begin{array}{c} x=1 \\ y=2 \end{array} | x=1,y=2 ¦ \begin{equation*} x=1 \end{equation*} | 1
\begin{cases} x = 1, \\ y = 2. \end{cases} | x=1,y=2 ¦ \begin{aligned} x &= 1 \quad\text{and}\\ y &= 2 \end{aligned} | x=1,y=2
\begin{aligned}[t] x&=1\\ y&=2\end{aligned} | x=1,y=2 ¦ \begin{align} x &= 3 \\ y &= -2 \\ z &= 5 \end{align} | (3,-2,5)
\begin{alignedat}{2} x&=1\\ y&=2\end{alignedat} | x=1,y=2 ¦ \begin{aligned} x &= 1 \\ y &= 2 \\ \end{aligned} | (1,2)
2⁻¹ | \frac12 ¦ x²y³ | x^2y^3 ¦ √3⁄2 | \frac{\sqrt3}{2} ¦ (x+1)² | x^2+2x+1 ¦ ½π | \frac{\pi}{2} ¦ π² | \pi^2 ¦ e⁻ˣ | e^{-x}
2ˣ | 2^x ¦ aₙ | a_n ¦ x₁² | x_1^2 ¦ 5·10³ | 5000 ¦ 3 × 10^5 | 300000 ¦ 3x10^5 | 300000 ¦ 3 x 10^5 | 300000 ¦ 3*10^5 | 300000
6.02 × 10²³ | 6.02\times10^{23} ¦ 1.6×10⁻¹⁹ C | 1.6\times 10^{-19} ¦ 10⁶ | 1000000 ¦ \mathbf{\underline{5}} | 5
\textbf{\underline{5}} | 5 ¦ $\underline{5}$ | 5 ¦ \underline{\quad 5 \quad} | 5 ¦ \underline{x+1} | x+1
\underline{ (1,2) } | (1,2) ¦ __5__ | 5 ¦ 17 \bmod{5} | 2 ¦ 17 \mod{5} | 2 ¦ 100 \bmod 7 | 2 ¦ (3^4) \bmod 5 | 1
2 \pmod 5 | 2 \pmod{5} ¦ 2 \pmod{5} | 2 (mod 5) ¦ n \equiv 2 \pmod{5} | n \equiv 2 (\text{mod } 5) ¦ B) $12$ | B
B. $\frac{1}{2}$ | B ¦ B: $x^2$ | B ¦ **B** | B ¦ \text{Option B} | B ¦ \mathbf{B.}\ 12 | B ¦ b. 12 | B ¦ \text{(B)}~12 | B
B: Paris | B ¦ (B)\;12 | B ¦ \textbf{(B) } 12 | B ¦ B. 12\text{ cm} | B ¦ B . 12 | B ¦ C) 1/2 | C ¦ A: -5 | A ¦ D. 3.5 | D
E) 100 | E ¦ (A) 0 | A ¦ 5厘米² | 5 ¦ 5 cm² | 5 ¦ 5平方米 | 5 ¦ 5個 | 5 ¦ 5円 | 5 ¦ 5公里/小时 | 5 ¦ 5\text{米/秒} | 5
5名学生 | 5 ¦ 5\,\mathrm{\Omega} | 5 ¦ 5\,\mathrm{k\Omega} | 5 ¦ 5\,\mathrm{M\Omega} | 5 ¦ 5\,\Omega\,\mathrm{m} | 5
5\,\mathrm{m}^2\,\mathrm{s}^{-1} | 5 ¦ 5\,\mathrm{m}^{2}/\mathrm{s} | 5 ¦ 5\,\text{N}\,\text{m} | 5 ¦ 5\,\mathrm{N\,m} | 5
5\,\mathrm{W/(m^2\,K)} | 5 ¦ 5\times10^{3}\,\mathrm{m\,s^{-1}} | 5000 ¦ 5\,\dfrac{\text{m}}{\text{s}} | 5
5 \text{ m·s}^{-1} | 5 ¦ 5 J/(kg·K) | 5 ¦ 5 kW·h | 5 ¦ 5 mol/L | 5 ¦ 5\ \mathrm{mol\cdot L^{-1}} | 5
5\,\mathrm{kg}\cdot\mathrm{m}/\mathrm{s}^2 | 5 ¦ 5\,\text{kg m}^2 | 5 ¦ 5\,\text{kg} \cdot \text{m/s}^2 | 5
\frac{5}{2}\,\mathrm{m\,s^{-2}} | 2.5 ¦ 2\sqrt{5}\,\mathrm{m\,s^{-1}} | 2\sqrt5 ¦ -5\,\mu\text{C} | -5
5\,\mu\mathrm{g/mL} | 5 ¦ 5\,\mu g | 5 ¦ 5 μs | 5 ¦ 5\,\mu\Omega | 5 ¦ 5\,\mathrm{\mu F} | 5 ¦ 5\,\text{$\mu$m} | 5
5\,\Omega^{-1} | 5 ¦ 5\,\hbar | 5\hbar ¦ 5\,\text{ev} | 5 ¦ 5\,\textrm{ m/s} | 5 ¦ 100° | 100 ¦ 100 °C | 100
100\,^\circ\text{F} | 100 ¦ 30^{\circ}. | 30 ¦ 30^ o | 30 ¦ 30^\mathrm{o} | 30 ¦ \angle A = 30^o | 30 ¦ 100^{\text{th}} | 100
\text{12th} | 12 ¦ 12 th | 12 ¦ 12^{\rm th} | 12 ¦ 13^{\textnormal{th}} | 13
"""

# A rule, a reply that it finds right, and the label.
REPLIES = r"""
math | So \fbox{5} | 5 ¦ math | So $\boxed 5$ | 5 ¦ math | So $\boxed{4}$ no \fbox{5} | 5
gsm8k | So $\fbox{4}$ no \boxed{5} | 5 ¦ gsm8k | So \boxed5. | 5 ¦ gsm8k | So \boxed 12 | 12
gsm8k | So $\boxed 1,234$ | 1234 ¦ gsm8k | So \boxed -5 | -5 ¦ gsm8k | So \boxed 2.5. Done | 2.5
math | So $\boxed\frac12$ | 1/2 ¦ math | So $\boxed \frac{1}{2}$ | 1/2 ¦ math | So $\boxed x$ | x ¦ acc | So $\boxed 5$ | 5
acc | So \fbox{5} | 5 ¦ math_17k_acc | So \framebox{5} | 5 ¦ gsm8k | #### 1 000 | 1000 ¦ gsm8k | #### 12 345 678 | 12345678
gsm8k | #### 1 000.50 | 1000.5 ¦ gsm8k | #### 1 000 dollars | 1000 ¦ gsm8k | #### $1 000 | 1000 ¦ gsm8k | #### 1\,000 | 1000
gsm8k | #### -1 000 | -1000 ¦ gsm8k | #### approximately 5 | 5 ¦ gsm8k | <answer>about 5</answer> | 5
gsm8k | The answer is around 5 | 5 ¦ gsm8k | The answer is roughly $5 | 5 ¦ gsm8k | The answer is exactly 5. | 5
gsm8k | The answer is nearly 5 | 5 ¦ gsm8k | The answer is approx. 5 | 5 ¦ gsm8k | The answer is ~5 | 5
gsm8k | The answer is ≈ 5 | 5 ¦ gsm8k | The answer is \approx 5 | 5 ¦ gsm8k | The answer is therefore 5 | 5
gsm8k | The answer is simply 5. | 5 ¦ gsm8k | The answer is about $5.00$ dollars | 5
gsm8k | Final answer: approximately **5** | 5 ¦ math | The answer is approximately $\frac{1}{2}$ | 0.5 ¦ gsm8k | 答案为5 | 5
gsm8k | 答案：5 | 5 ¦ gsm8k | 答案: $5$ | 5 ¦ gsm8k | 所以，答案是 5 元。 | 5 ¦ gsm8k | 因此，最终答案是：**5**。 | 5
gsm8k | 答案等于5 | 5 ¦ gsm8k | 答案就是5。 | 5 ¦ gsm8k | 答案应该是5。 | 5 ¦ gsm8k | 答案是约5 | 5
gsm8k | 答案是大约5个苹果。 | 5 ¦ gsm8k | 正确答案为：5 | 5 ¦ gsm8k | 答：5 | 5 ¦ gsm8k | 最终答案为 \(5\)。 | 5
gsm8k | 答案是5。谢谢！ | 5 ¦ math | 所以答案是 $\frac{1}{2}$。 | 1/2 ¦ math | 答案是B。 | B ¦ math | 故选B。 | B
math | 所以选择B | B ¦ gsm8k | 答案是5万元。 | 50000 ¦ math | The answer is B) 12 | B
math | The correct answer is (B) 12. | B ¦ math | \boxed{\text{B. }12} | B ¦ math | \boxed{B. 12} | B
math | Answer: B. 12 | B ¦ gsm8k | $\boxed 5 $ | 5 ¦ gsm8k | \boxed5$ | 5 ¦ gsm8k | \fbox{$5$} | 5
gsm8k | \fbox{\textbf{5}} | 5 ¦ gsm8k | \fbox 5 | 5 ¦ gsm8k | \boxed  5. | 5 ¦ gsm8k | $\boxed 5.$ | 5
gsm8k | \[\boxed 5\] | 5 ¦ gsm8k | \(\boxed 5\) | 5 ¦ gsm8k | $\boxed -5$ | -5 ¦ gsm8k | $\boxed 5\%$ | 5
gsm8k | $\boxed \$5$ | 5 ¦ math | $\boxed \pi$ | \pi ¦ math | $\boxed A$ | A ¦ math | $\boxed \sqrt{2}$ | \sqrt2
gsm8k | #### 1 000 000 | 1000000 ¦ gsm8k | #### 12 000.5 | 12000.5 ¦ gsm8k | #### $1 000.00 | 1000
gsm8k | #### 1 000 kg | 1000 ¦ gsm8k | \boxed{1 000} | 1000 ¦ gsm8k | The answer is 1 000. | 1000
gsm8k | The answer is 1 000 dollars. | 1000 ¦ gsm8k | The final answer is about 5 | 5 ¦ gsm8k | The answer would be 5 | 5
gsm8k | The answer should be 5. | 5 ¦ gsm8k | The answer must be 5. | 5 ¦ gsm8k | The answer equals 5 | 5
gsm8k | The answer is approximately equal to 5 | 5 ¦ gsm8k | The answer is close to 5 | 5 ¦ gsm8k | The answer is ≈5 | 5
gsm8k | Answer ≈ 5 | 5 ¦ gsm8k | The answer is about $5. | 5 ¦ gsm8k | The answer is approximately 5 dollars. | 5
gsm8k | The answer is about 1,200 | 1200 ¦ gsm8k | The answer is approximately: 5 | 5
gsm8k | The answer is around 5 hours | 5 ¦ gsm8k | The answer is just 5 | 5 ¦ gsm8k | The answer is only 5 | 5
gsm8k | 【答案】5 | 5 ¦ gsm8k | 答案应为5 | 5 ¦ gsm8k | 答案约为5 | 5 ¦ gsm8k | 答案大约是5。 | 5 ¦ gsm8k | 最后答案是5 | 5
gsm8k | 故答案为：5 | 5 ¦ gsm8k | 答案是５ | 5 ¦ gsm8k | 答案是-5 | -5 ¦ gsm8k | 答案是：$5$元 | 5
gsm8k | 答案是1,000元。 | 1000 ¦ gsm8k | 答案是 \(5\) 。 | 5 ¦ gsm8k | 答案是**5**个 | 5 ¦ gsm8k | 答案即为5 | 5
gsm8k | 所以最终的答案是：5。 | 5 ¦ gsm8k | 答案: 5 | 5 ¦ gsm8k | **答案**：5 | 5 ¦ gsm8k | **答案：** 5 | 5
gsm8k | **最终答案：5** | 5
"""


def pairs(block: str) -> list[tuple[str, str]]:
    return [tuple(pair.split(" | ", 1)) for line in block.strip("\n").split("\n") for pair in line.split(" ¦ ")]  # type: ignore[misc]


def classes() -> dict[str, list[tuple[str, str]]]:
    """The pairs of `EQUAL` by class."""
    found = [part.split("\n", 1) for part in EQUAL.strip("\n").removeprefix("# ").split("\n# ")]
    return {name: pairs(block) for name, block in found}
