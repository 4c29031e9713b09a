"""Private code that all packages share: types of results, dtypes, contracts of operators, forward mode."""
