"""What every pass needs of an FX graph: nodes, roles, prints, checks. Knows no pass."""
