"""Plans on disk and beside each other: their file form, what they are made of, caches, differences."""
