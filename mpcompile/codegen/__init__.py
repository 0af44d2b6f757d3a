"""From the arithmetic of a traced update to a loaded kernel; see DESIGN.md section 5."""
