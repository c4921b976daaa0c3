"""The mathematics of GSPO: tensors in, tensors out.

Not here: configuration, files, services, models. Imports torch and the standard library, nothing of ours.

Letters in names tell shapes: B rollouts, T token positions, V vocabulary, D hidden width, N rows. `mask_BT` is
1 on tokens the policy sampled and 0 on prompt, observation, tool and padding tokens; L_i = sum_t m_it.
"""
