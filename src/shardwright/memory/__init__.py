"""Plans within memory: steps rewritten to keep less, devices byte by byte, and answers where nothing fits."""
