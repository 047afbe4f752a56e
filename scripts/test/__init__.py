"""The checks of this project, as stages in two lanes: `python -m scripts.test all`."""
