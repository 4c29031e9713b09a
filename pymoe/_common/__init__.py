"""Private code that all packages share: types of results, dtypes, checks of arguments, contracts of operators."""
