"""Plans, profiles and comparisons for people: words, tables, pictures and a page."""
