"""Which parameters take which update, their matrices, and the table of their states."""
