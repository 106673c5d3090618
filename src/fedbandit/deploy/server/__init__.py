"""On the server: rounds over devices, what they sent, what is kept. Knows no transport."""
