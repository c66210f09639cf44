//! What torch.save writes.
