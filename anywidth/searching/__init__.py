"""The best channel numbers for a budget."""
