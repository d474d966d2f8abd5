"""Other trust regions and corrections of ratios."""
