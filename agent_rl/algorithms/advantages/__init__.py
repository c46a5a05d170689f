"""Advantages: how much better something went than was to be expected, for episodes, turns or tokens.

`episode` judges whole episodes, `token` tokens, `turn` turns; `critic` needs one. Importing a module registers its
advantages.
"""
