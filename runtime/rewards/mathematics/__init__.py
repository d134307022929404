"""Whether two final answers are mathematically the same: `answers.equal`. Pure functions; nothing here evaluates text as code.

answers     the entry: screens, then structure, then algebra
tidy        LaTeX as people and models write it, made uniform
lexer, parser, tree     an answer's text as an expression tree
structures, real_sets   lists, tuples, sets, intervals, relations, matrices
scalars     one expression against another: exact arithmetic, random points, decimals, percent
exact, residues, approximate    three ways to evaluate: rational, modulo primes, to many digits
algebra     what the parser does not know, left to math-verify
"""
