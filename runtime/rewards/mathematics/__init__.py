"""Compare two final answers mathematically: `answers.equal`. Pure functions; nothing here evaluates text as code.

answers     the entry: screens, then comparison, then math-verify tidy        unify the LaTeX of people and models parser
an answer's text as an expression tree comparison  lists, sets, intervals, relations, matrices; expressions by exact arithmetic,
at random points, to six digits tree        expression trees, and two ways to evaluate them: rational, to many digits"""
