"""What was done to a step, as plain data and as tables. Looks on; knows no backend."""
