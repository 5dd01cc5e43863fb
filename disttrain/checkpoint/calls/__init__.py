"""`save`, `load` and `async_save` in our form and in torch.distributed.checkpoint's, with what that takes.

In torch's form, with `checkpoint_id`, `storage_writer` or `storage_reader`, they behave as torch's: a save takes the
place of the one before, a load leaves alone what the state does not have and converts dtypes.
"""
