"""Other policies of a loss: `other_policies` scores tokens under the reference and the proximal
policy, `reference_scores` under the reference outside the trainer.
"""
