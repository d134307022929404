"""What an evaluation looks at, and what it found."""
