"""Scripts to run after ``pip install -e ".[examples]"``; a package so that benchmarks can share."""
