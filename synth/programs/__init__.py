"""Programs: what an assignment of choices amounts to: instructions, their bill, whether they fit."""
