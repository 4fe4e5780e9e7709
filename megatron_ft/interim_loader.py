import torch
class LedgerIterator:
    def __init__(self, *, dataset, micro_batch_size, global_microbatches, dp_rank, dp_size, consumed_samples, kind):
        self.dataset=dataset; self.mbs=micro_batch_size; self.B=global_microbatches
        self.dp_rank=dp_rank; self.dp_size=dp_size; self.base=consumed_samples; self.kind=kind
        self.queue=[]; self.held=False
    def begin_step(self, base): self.base=base; self.queue=[]; self.held=True
    def assign(self, ids): self.queue=list(ids)
    def __next__(self):
        if not self.queue:
            assert not self.held
            self.queue=list(range(self.dp_rank,self.B,self.dp_size))
            self.fresh=True
        m=self.queue.pop(0)
        first=self.base+m*self.mbs
        out=torch.utils.data.default_collate([self.dataset[i] for i in range(first,first+self.mbs)])
        if not self.queue and not self.held: self.base+=self.B*self.mbs
        return out
