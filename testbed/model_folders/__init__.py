"""Folders of models as people bring them: `weight_folders` has files of weights in the forms that
libraries write, and forms that contradict themselves; `tokenizer_folders` has tokenizers over all
the files from which transformers takes one; `reading` compares our readers with transformers.
"""
