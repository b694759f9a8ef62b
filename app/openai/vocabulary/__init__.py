"""Token ids that the tokenizer knows and the model has no row for, as after a fine-tune that added tokens.

rows.py   refused at the start where every prompt would have them, else prompt by prompt
"""
