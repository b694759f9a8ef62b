"""The rules, one function each. A function's name is its advice's; its docstring is the rule."""
