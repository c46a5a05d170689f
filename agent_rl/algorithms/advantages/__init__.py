"""Advantages: how much better something went than was to be expected, on every sampled token.

`outcome` judges whole episodes, `token` tokens, `turn` turns: pure functions of tensors. `choices` names them
for configs, `critic` those that need one.
"""
