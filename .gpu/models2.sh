# Whole models on two GPUs.
L="python3 -m disttrain_launch --standalone --nproc-per-node"
M=benchmarks/models_gpu.py
timeout 100 $L 2 $M fsdp --steps 5 --patience 52 --ways "torch compiled" "kernels around compiled" "kernels compiled" --profile "torch compiled" "kernels around compiled" --out $OUT/fsdp.json > $OUT/fsdp.txt 2>&1 < /dev/null
timeout 65 $L 2 $M tp --steps 5 --patience 40 --ways "torch compiled, gathered logits" "kernels compiled" "torch compiled" "ours compiled" --profile "torch compiled, gathered logits" "kernels compiled" --out $OUT/tp.json > $OUT/tp.txt 2>&1 < /dev/null
for f in fsdp tp; do grep -v "  *[0-9.]* ms  *[0-9]*  " $OUT/$f.txt | tail -n 12; done; date
cd $OUT && tar czf all.tgz *.txt *.json && rm -f *.txt *.json; ls -la
