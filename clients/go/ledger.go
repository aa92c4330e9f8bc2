package tmc

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	tmcv1 "tmc/v1"
)

const (
	committed  = 1 // the states of a row in tmc_ledger
	rolledBack = 2

	resumeEvery  = time.Minute
	page         = 500
	decideWithin = 2 * time.Second
)

// Ledger is the list of committed messages in the database of a service. A row of it is written by the transaction that a message
// belongs to, so it can always be answered what became of it.
type Ledger struct {
	client   *Client
	db       *sql.DB
	database Database
	id       []byte
	settled  chan string
}

// Ledger returns the ledger in db, which gets its tables if it has none. From then on, messages that an earlier process committed
// and could not submit are submitted.
func (c *Client) Ledger(ctx context.Context, db *sql.DB, database Database) (*Ledger, error) {
	if err := database.createTables(ctx, db, ledgerTables); err != nil {
		return nil, err
	}
	insert := database.insertUnless("tmc_ledger_info", "id, ledger_id")
	if _, err := db.ExecContext(ctx, insert, 1, NewAttempt()); err != nil {
		return nil, fmt.Errorf("tmc: %w", err)
	}
	l := &Ledger{client: c, db: db, database: database, settled: make(chan string, page)}
	if err := db.QueryRowContext(ctx, "SELECT ledger_id FROM tmc_ledger_info").Scan(&l.id); err != nil {
		return nil, fmt.Errorf("tmc: %w", err)
	}
	c.hasLedger(l.id)
	c.busy.Go(l.settle)
	c.busy.Go(l.resume)
	return l, nil
}

// Tx is a local transaction that sends messages.
type Tx struct {
	*sql.Tx
	ledger *Ledger
	sent   []sent
}

type sent struct {
	id      string
	message Message
}

// Send prepares a message: it is delivered if this transaction commits. Call it late, since the transaction is open meanwhile.
func (t *Tx) Send(ctx context.Context, m Message) error {
	m.Attempt = attemptOf(m)
	id, err := t.ledger.client.prepare(ctx, m, t.ledger.id)
	if err != nil {
		return err
	}
	t.sent = append(t.sent, sent{id: id, message: m})
	return nil
}

// Transact runs work in a transaction and commits it, or rolls it back if work returns an error or panics. The messages that it
// sent are delivered in the first case and discarded in the second.
//
// No error: the transaction is committed, and its messages are submitted, or will be as soon as the center answers.
// ErrFenced: it took so long that the center was told it had not committed; run it again.
// ErrInDoubt: the database did not say whether it committed, and cannot be asked now. The center asks later, and does what is right.
func (l *Ledger) Transact(ctx context.Context, work func(tx *Tx) error) error {
	local, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	tx, done := &Tx{Tx: local, ledger: l}, false
	defer func() {
		if !done { // work panicked, or left by runtime.Goexit
			_ = local.Rollback()
			l.discard(ctx, tx.sent)
		}
	}()
	err = work(tx)
	if err == nil {
		err = tx.write(ctx)
	}
	done = true
	if err != nil {
		_ = local.Rollback() // its error says no more: what is not committed is rolled back
		l.discard(ctx, tx.sent)
		return err
	}
	if err := local.Commit(); err != nil && !l.isCommitted(ctx, tx.sent, &err) {
		return err
	}
	l.submit(ctx, tx.sent)
	return nil
}

var (
	// ErrFenced says that a transaction must be run again.
	ErrFenced = errors.New("tmc: the center was told that this transaction had not committed, and so it cannot any more: run it again")
	// ErrInDoubt says that nobody knows yet whether a transaction committed.
	ErrInDoubt = errors.New("tmc: the transaction may have committed")
)

// write inserts the rows of the messages, in the order of their keys: two transactions cannot wait for each other.
func (t *Tx) write(ctx context.Context) error {
	slices.SortFunc(t.sent, func(a, b sent) int { return cmp.Compare(a.id, b.id) })
	insert := t.ledger.database.insertUnless("tmc_ledger", "message_id, state, topic, message_key, attempt_id, created_ms")
	for _, each := range t.sent {
		m := each.message
		done, err := t.ExecContext(ctx, insert, each.id, committed, m.Topic, m.Key, m.Attempt, nowMs())
		if err != nil {
			return err
		}
		if changed, err := done.RowsAffected(); err != nil {
			return err
		} else if changed == 0 {
			return ErrFenced
		}
	}
	return nil
}

// isCommitted asks the ledger after a Commit failed: the database may have committed, and its answer was lost. The fence makes
// a "no" final. why: the error of Commit; becomes what the caller gets.
func (l *Ledger) isCommitted(ctx context.Context, messages []sent, why *error) bool {
	if len(messages) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), decideWithin)
	defer cancel()
	m := messages[0]
	answer := l.answer(ctx, &tmcv1.CheckRequest{
		MessageId: m.id, Topic: m.message.Topic, Key: m.message.Key, AttemptId: m.message.Attempt, LedgerId: l.id, CreatedMs: nowMs(),
	}, true)
	switch answer.Verdict {
	case tmcv1.Verdict_VERDICT_COMMIT:
		return true
	case tmcv1.Verdict_VERDICT_ROLLBACK:
		l.discard(ctx, messages)
		return false
	}
	*why = fmt.Errorf("%w: %w", ErrInDoubt, *why)
	return false
}

// discard rolls back messages at the center. What does not arrive, a check finds out.
func (l *Ledger) discard(ctx context.Context, messages []sent) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), decideWithin)
	defer cancel()
	each(messages, func(m sent) {
		if err := l.client.Rollback(ctx, m.id); err != nil {
			l.client.log.Info("tmc: a check will roll the message back", "message_id", m.id, "error", err)
		}
	})
}

// submit submits messages. What does not arrive before ctx ends, resume or a check submits.
func (l *Ledger) submit(ctx context.Context, messages []sent) {
	ctx, cancel := context.WithTimeout(ctx, decideWithin)
	defer cancel()
	inOrder := map[string][]string{} // of an order key, one after another
	for _, m := range messages {
		line := m.id
		if m.message.OrderKey != "" {
			line = "\x00" + m.message.Topic + "\x00" + m.message.OrderKey
		}
		inOrder[line] = append(inOrder[line], m.id)
	}
	lines := make([][]string, 0, len(inOrder))
	for _, ids := range inOrder {
		lines = append(lines, ids)
	}
	each(lines, func(ids []string) {
		for _, id := range ids {
			if !l.submitOne(ctx, id) {
				return
			}
		}
	})
}

// submitOne returns whether a later message of its order key may be submitted.
func (l *Ledger) submitOne(ctx context.Context, id string) bool {
	err := l.client.Submit(ctx, id)
	var refusal *Error
	switch {
	case err == nil, errors.As(err, &refusal) && refusal.Reason == tmcv1.Reason_MESSAGE_GONE:
		select {
		case l.settled <- id:
		default: // the database is slow: resume settles it
		}
		return true
	case errors.As(err, &refusal) && (refusal.Reason == tmcv1.Reason_ALREADY_ROLLED_BACK || refusal.Reason == tmcv1.Reason_MESSAGE_UNKNOWN):
		l.client.log.Error("tmc: somebody decided otherwise about a committed message: see its ledger row", "message_id", id, "error", err)
		return true
	}
	l.client.log.Info("tmc: a committed message is submitted later", "message_id", id, "error", err)
	return false
}

// each calls do for all items at once.
func each[T any](items []T, do func(T)) {
	if len(items) == 1 {
		do(items[0])
		return
	}
	all := sync.WaitGroup{}
	for _, item := range items {
		all.Go(func() { do(item) })
	}
	all.Wait()
}

// settle notes what the center has, some at a time, until the client is closed and all is noted.
func (l *Ledger) settle() {
	for {
		select {
		case id := <-l.settled:
			ids := []string{id}
			for len(ids) < page && len(l.settled) > 0 {
				ids = append(ids, <-l.settled)
			}
			if err := l.note(ids); err != nil {
				l.client.log.Info("tmc: messages are noted as settled later", "error", err)
				sleep(l.client.ctx, time.Second)
			}
		case <-l.client.ctx.Done():
			if len(l.settled) == 0 {
				return
			}
		}
	}
}

// note marks rows as settled. A mark that is lost costs one more submit.
func (l *Ledger) note(ids []string) error {
	slices.Sort(ids)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.client.ctx), decideWithin)
	defer cancel()
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	mark := l.database.sql("UPDATE tmc_ledger SET settled_ms = ? WHERE message_id = ? AND settled_ms IS NULL")
	for _, id := range ids {
		if _, err := tx.ExecContext(ctx, mark, nowMs(), id); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// resume submits what is committed and not settled, at once and then every minute.
func (l *Ledger) resume() {
	before := nowMs() + time.Hour.Milliseconds() // at first all, whatever clock an earlier process had
	for {
		if err := l.submitUnsettled(before); err != nil && l.client.ctx.Err() == nil {
			l.client.log.Warn("tmc: committed messages are submitted later", "error", err)
		}
		if !sleep(l.client.ctx, resumeEvery) {
			return
		}
		before = nowMs() - resumeEvery.Milliseconds()
	}
}

func (l *Ledger) submitUnsettled(before int64) error {
	query := l.database.sql("SELECT message_id FROM tmc_ledger " +
		"WHERE settled_ms IS NULL AND state = ? AND created_ms < ? AND message_id > ? ORDER BY message_id LIMIT ?")
	for last := ""; ; {
		ids, err := textsOf(l.db.QueryContext(l.client.ctx, query, committed, before, last, page))
		if err != nil {
			return err
		}
		each(ids, func(id string) { l.submitOne(l.client.ctx, id) })
		if len(ids) < page {
			return nil
		}
		last = ids[len(ids)-1]
	}
}

// textsOf returns the only column of rows.
func textsOf(rows *sql.Rows, err error) ([]string, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	texts := []string{}
	for rows.Next() {
		text := ""
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		texts = append(texts, text)
	}
	return texts, rows.Err()
}
