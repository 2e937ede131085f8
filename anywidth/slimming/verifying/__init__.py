"""Running a converted network at other widths, and what is done about widths that fail."""
