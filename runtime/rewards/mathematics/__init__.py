"""Compare two final answers mathematically: `answers.equal`. Pure functions; nothing here evaluates text as code.

answers     the entry: screens, then structure, then math-verify
tidy        unify the LaTeX of people and models
lexer, primaries, parser, tree      an answer's text as an expression tree
structures  lists, tuples, sets, intervals, relations, matrices
scalars     compare two expressions: exact arithmetic, random points, decimals, percent
exact, approximate      two ways to evaluate: rational, to many digits
"""
