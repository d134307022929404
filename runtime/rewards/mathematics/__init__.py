"""Whether two final answers are mathematically the same: `answers.equal`. Pure functions; nothing here evaluates text as code.

answers     the entry: screens, then structure, then math-verify
tidy        LaTeX as people and models write it, made uniform
lexer, primaries, parser, tree      an answer's text as an expression tree
structures  lists, tuples, sets, intervals, relations, matrices
scalars     one expression against another: exact arithmetic, random points, decimals, percent
exact, approximate      two ways to evaluate: rational, to many digits
"""
