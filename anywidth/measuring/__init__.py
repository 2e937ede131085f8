"""What a width costs and how well it does."""
