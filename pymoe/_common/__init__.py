"""What all packages need, and no user calls: types of results, dtypes, checks of arguments, contracts of operators."""
