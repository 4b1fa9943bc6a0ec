/* Errors as on real adapters, preloaded (LD_PRELOAD) into a process that uses soft-RoCE.
 *
 * Mooncake asks for 7 retries of a packet. An adapter gives up after them; the kernel's soft-RoCE takes 7 for "for ever"
 * (rxe_comp.c). With 6, a peer that does not answer ends a write with an error here, too: if GIVES_UP is set. Of libibverbs' header only the
 * two names are used. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdlib.h>

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	static int (*next)(struct ibv_qp *, struct ibv_qp_attr *, int);

	if (!next)
		next = (int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))dlvsym(
			dlopen("libibverbs.so.1", RTLD_LAZY), "ibv_modify_qp", "IBVERBS_1.1");
	if ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt == 7 && getenv("GIVES_UP"))
		attr->retry_cnt = 6;
	return next(qp, attr, mask);
}
