"""Models as folders of Hugging Face's form, read by one code for every role.

`hf_folder` finds and checks one, `hf_weights` reads its weights, `hf_tokenizer` its tokenizer;
`model_fit` compares weights with the model's class. `lora` attaches adapters, which `lora_folder`
reads.
"""
